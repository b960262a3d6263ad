"""The report of `pykern plan auto`."""

import pytest
from typer.testing import CliRunner

from pykern.cli import app

NOTE = "The search took all stages to train, and none to be recomputed:"


def printed(*options: str) -> str:
    return CliRunner().invoke(app, ["plan", "auto", "--budget", "1", *options]).stdout


@pytest.mark.parametrize("option", ["--frozen", "--recompute"])
def test_options_that_change_the_plan_afterwards_are_not_in_the_report(option: str) -> None:
    out = printed(option, "0")
    assert NOTE in out
    assert "lower bound" in out[out.index(NOTE) :]


def test_a_plan_that_is_drawn_as_found_has_no_note() -> None:
    out = printed()
    assert NOTE not in out
    assert "lower bound" in out

"""`pykern tune`: its table, its file, and its exit code after an interrupt."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import pykern
from pykern import tuning
from pykern.cli import app
from pykern.cli.reports import require_files
from pykern.tuning import cache


class Found:
    """A choice that nothing was measured for."""

    def __str__(self) -> str:
        return "the table"

    def save(self, path: Path) -> None:
        """Writes something."""
        path.write_text("saved")


def test_the_choice_is_printed_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def tune(_: object, **more: Any) -> Found:
        given.update(more)
        return Found()

    monkeypatch.setattr(tuning, "tune", tune)
    out = tmp_path / "plan.json"
    arguments = ["tune", "--devices", "cpu:3", "--memory", "2", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"the table\nwritten: {out}\n"
    assert out.read_text() == "saved"
    assert (given["devices"], given["memory"]) == ("cpu:3", 2 * 2**30)


def test_a_box_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def tune(_: object, **more: Any) -> Found:
        given.update(more)
        return Found()

    monkeypatch.setattr(tuning, "tune", tune)
    result = CliRunner().invoke(app, ["tune", "--devices", "cpu:1", "--box", "4x4090"])
    assert result.exit_code == 0, result.stderr
    assert given["box"].name == "4 of 8 x GeForce RTX 4090, copies by the host"


def test_an_interrupt_prints_and_saves_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*_: object, **__: object) -> None:
        found: Any = Found()
        raise pykern.TuneInterrupted(found)

    monkeypatch.setattr(tuning, "tune", tune)
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["tune", "--out", str(out)])
    assert result.exit_code == 130
    assert result.stdout == f"the table\nwritten: {out}\n"
    assert out.read_text() == "saved"


def test_the_choice_is_printed_though_it_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minutes that it had taken were lost."""

    class Unsaved(Found):
        def save(self, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(tuning, "tune", lambda *_, **__: Unsaved())
    result = CliRunner().invoke(app, ["tune", "--out", "plan.json"])
    assert (result.exit_code, result.stdout) == (2, "the table\n")
    assert result.stderr == "pykern: plan.json: No space left on device\n"


@pytest.mark.parametrize("option", ["--out", "--resume"])
def test_a_file_without_a_folder_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        pytest.fail("the work would be lost")

    monkeypatch.setattr(cache, "measure", measured)
    result = CliRunner().invoke(app, ["tune", option, str(tmp_path / "absent" / "file.json")])
    assert result.exit_code == 2
    assert f"{option.strip('-')} must be a file in a folder that exists" in result.stderr


def test_measurements_that_are_there_may_be_where_nothing_can_be_written() -> None:
    there = Path("/proc/version")
    require_files(resume=there)
    with pytest.raises(ValueError, match="--out must be a file in a folder that may be written to"):
        require_files(out=there)


def normed() -> tuple[Any, ...]:
    """A model that refuses a microbatch of one row."""
    x = torch.ones(8, 4)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), x, x, F.mse_loss


def test_a_model_that_takes_no_single_row_is_told_of_it() -> None:
    result = CliRunner().invoke(app, ["tune", f"{__name__}:normed"])
    assert result.exit_code == 2
    assert "Expected more than 1 value per channel when training" in result.stderr
    assert "raised for a microbatch of 1 row; tune begins with 1" in result.stderr

"""`pykern fit`: its table, its verdict, its exit codes, and what it refuses in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pykern.cli import app

USERS = """
import torch
import torch.nn.functional as F
from torch import nn

def wide():
    # Without weights: these would be 64 GiB.
    model = nn.Sequential(*(nn.Linear(2**16, 2**16, bias=False) for _ in range(4)))
    x = torch.empty(64, 2**16)
    return model, x, x, F.mse_loss

def held():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    x = torch.empty(2**16, 256)
    return model, x, x, F.mse_loss
"""


@pytest.fixture(autouse=True)
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fitted.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def fit(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fit", *arguments], env={"COLUMNS": "100"})


def test_a_model_that_fits() -> None:
    result = fit("fitted:wide", "--devices", "2", "--memory", "256", "--optimizer", "SGD")
    assert result.exit_code == 0, result.stderr
    # Two layers each, and as much in gradients.
    rows = [line.split()[:4] for line in result.stdout.splitlines()[2:4]]
    assert rows == [["0", "32.000", "32.000", "0.000"], ["1", "32.000", "32.000", "0.000"]]
    assert "It fits in 256 GiB: the most is 80." in result.stdout


def test_a_model_that_needs_a_change() -> None:
    result = fit("fitted:held", "--devices", "2", "--memory", "0.25", "--microbatches", "2")
    assert result.exit_code == 1
    assert "It does not fit in 0.25 GiB: the most is 0." in result.stdout
    assert "It fits with microbatches=8: the most is 0." in result.stdout


def test_a_model_that_cannot_be_made_to_fit() -> None:
    result = fit("fitted:wide", "--devices", "2", "--memory", "40", "--recompute", "stage")
    assert result.exit_code == 1
    assert "Take more devices." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "Foo"], "--optimizer must be a class of torch.optim or none, got 'Foo'"),
        (
            ["fitted:nothing"],
            "the model must be a function of the module fitted, got 'nothing', which is not there",
        ),
        (["fitted:held", "--devices", "9"], "at least 9 layers"),
        (["--schedule", "foo"], "foo"),
        (["--schedule", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str) -> None:
    result = fit(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

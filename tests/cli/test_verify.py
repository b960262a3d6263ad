"""`pykern verify`: its table, its exit codes, and what it refuses in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pykern.cli import app
from pykern.schedules import by_name

USERS = """
import threading
import torch
from torch import nn

class Wrong(nn.Linear):
    def forward(self, x):
        worker = threading.current_thread() is not threading.main_thread()
        return super().forward(x) + worker

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x, *, scale):
        return self.b(self.a(x) * scale)

class Fails(nn.Linear):
    def forward(self, x):
        raise KeyError("mine")

def batch():
    return torch.randn(6, 8), torch.randn(6, 8)

def wrong():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Wrong(8, 8), nn.Linear(8, 8)), *batch()

def fails():
    return nn.Sequential(nn.Linear(8, 8), Fails(8, 8)), *batch()

def own():
    x, y = batch()
    return Own(), {"x": x, "scale": y}, None, lambda output: output.square().mean()

def classes():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), batch()[0], torch.randint(5, (6,))

def two():
    return 1, 2

def no_loss():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), batch()[0], None
"""


@pytest.fixture(autouse=True)
def _users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_model.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})


def rows(result: Result) -> dict[str, list[str]]:
    """The table, by schedule."""
    lines = [line.split() for line in result.stdout.splitlines()]
    return {line[0]: line[1:] for line in lines if line and line[0] in by_name}


@pytest.mark.slow
def test_every_schedule_is_in_the_table_and_all_that_run_are_equal() -> None:
    result = verify("--steps", "1")
    assert result.exit_code == 0
    found = rows(result)
    assert found.keys() == by_name.keys()
    refused = {name for name, row in found.items() if row[0] == "refused"}
    assert refused == {"seq1f1b", "pipedream", "pipedream_2bw"}
    assert all(row[1] == "equal" for name, row in found.items() if name not in refused)


def test_a_difference_is_told_and_ends_with_one() -> None:
    result = verify("users_model:wrong", "--schedule", "gpipe", "--schedule", "forward_only")
    assert result.exit_code == 1
    assert {name: row[:2] for name, row in rows(result).items()} == {
        "gpipe": ["2", "differs"],
        "forward_only": ["2", "differs"],
    }
    assert "The difference starts in stage 1" in result.stdout


def test_bounds_are_taken() -> None:
    arguments = ("users_model:wrong", "--schedule", "gpipe", "--steps", "1")
    assert verify(*arguments, "--atol", "100").exit_code == 0


@pytest.mark.parametrize("source", ["users_model:own", "users_model:classes"])
def test_models_of_users(source: str) -> None:
    result = verify(source, "--schedule", "one_f_one_b", "--recompute", "stage")
    assert (result.exit_code, rows(result)) == (0, {"one_f_one_b": ["2", "equal"]})


def test_what_fails_is_told_and_ends_with_one() -> None:
    result = verify("users_model:fails", "--schedule", "gpipe")
    assert result.exit_code == 1
    assert rows(result)["gpipe"] == ["2", "fails", "KeyError:", "'mine'"]


def test_options_of_schedules() -> None:
    result = verify("users_model:wrong", "--schedule", "hanayo", "--waves", "2")
    # Eight stages of four layers.
    assert (result.exit_code, rows(result)["hanayo"][0]) == (1, "refused")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["users_model"], "the model must be module:function, got 'users_model'"),
        (
            ["users_model:missing"],
            "the model must be a function of the module users_model, got 'missing', which "
            "is not there",
        ),
        (["nobodys_model:make"], "there is no module nobodys_model. Run pykern in its folder"),
        (["users_model:two", "--schedule", "gpipe"], "must return (model, inputs, target) or"),
        (
            ["users_model:no_loss", "--schedule", "gpipe"],
            "must return a target or a loss_fn, got neither",
        ),
        (["--schedule", "nothing"], "got 'nothing'"),
        (["--schedule", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
        (["--devices", "tpu"], "tpu"),
        (["--rtol", "inf"], "rtol must be finite"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    result = verify(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1

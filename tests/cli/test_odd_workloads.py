"""Functions that return no model and batch are refused in a line, before anything runs."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.cli import app

MODULE = """
import torch
from torch import nn

def number():
    return nn.Linear(2, 2), 3, 4, nn.functional.mse_loss

def empty():
    return nn.Linear(2, 2), torch.randn(0, 2), torch.randn(0, 2), nn.functional.mse_loss

def rows():
    return nn.Linear(2, 2), torch.randn(4, 2), torch.randn(3, 2)

def name():
    return "linear", torch.randn(4, 2), torch.randn(4, 2)

def classes():
    return nn.Linear(2, 2), torch.randn(4, 2), [0, 1, 0, 1]

def word():
    return nn.Linear(2, 2), torch.randn(4, 2), torch.randn(4, 2), "mse"
"""


@pytest.mark.parametrize("command", ["verify", "profile"])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("odd_workloads:number", "the batch must hold a tensor with a dimension 0"),
        ("odd_workloads:empty", "the batch must have at least 1 row, got 0"),
        ("odd_workloads:word", "must return a function as loss_fn, got str"),
        ("odd_workloads:rows", "target must have as many rows in dimension 0 as the tensors"),
        ("odd_workloads:name", "must return a model as for Pipeline first, got str"),
        ("odd_workloads:classes", "tensor as target or a loss_fn, got a target of type list"),
        (
            "odd_workloads.py:word",
            "got 'odd_workloads.py:word': there is no module odd_workloads.py. Leave out .py",
        ),
        ("./odd_workloads:word", "must be module:function, got './odd_workloads:word'"),
    ],
)
def test_other_functions_are_refused_in_a_line(
    command: str, source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracebacks, or words of Python about packages."""
    (tmp_path / "odd_workloads.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, [command, source, "--schedule", "gpipe"])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["verify", "profile", "fit"])
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("made = 1 / 0", "ZeroDivisionError: division by zero"),
        ("def make():\n    raise RuntimeError('no data')", "RuntimeError: no data"),
        ("def make(:", "SyntaxError: invalid syntax"),
    ],
)
def test_errors_of_the_module_begin_at_its_own_line(
    command: str, text: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback began in the command line, twenty frames above."""
    (tmp_path / "failing_workload.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_workload", raising=False)
    done = CliRunner().invoke(app, [command, "failing_workload:make", "--schedule", "gpipe"])
    assert done.exit_code == 1
    assert error in done.stderr
    assert "pykern" not in done.stderr
    assert done.stderr.count('  File "') == 1

"""`pykern profile SCRIPT`: a user's own script, unchanged, up to its second step."""

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.cli import app
from tests.rehearse.scripts import line_with, written

SCRIPT = """
import argparse, torch
from torch import nn
import pykern

parser = argparse.ArgumentParser()
parser.add_argument("--devices", default="cpu:2")
parser.add_argument("--lr", type=float, default=0.1)
given = parser.parse_args()
assert __name__ == "__main__"
layers = [nn.Linear(8, 8) for _ in range(4)]
loss = nn.functional.mse_loss
pipe = pykern.Pipeline(layers, devices=given.devices, microbatches=4, loss_fn=loss)
optimizer = torch.optim.Adam(pipe.parameters(), lr=given.lr)
for number in range(5):
    print("step", number)
    x = torch.randn(8 + number, 8)
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()
"""


def profiled(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["profile", "--steps", "1", *arguments])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_the_second_step_of_a_script_is_profiled(tmp_path: Path) -> None:
    script, html = written(tmp_path, SCRIPT), tmp_path / "step.html"
    code, out, err = profiled(str(script), "--html", str(html), "--lr", "0.5")
    assert code == 0, err
    assert out.startswith("step 0\nstep 1\n1 step of 9 rows in 4 microbatches, 2 stages on 2 ")
    assert "Why a step takes its time" in out
    assert html.exists()
    assert "step 2" not in out


def test_options_of_both_are_the_scripts_behind_dashes(tmp_path: Path) -> None:
    script = str(written(tmp_path, SCRIPT))
    code, out, err = profiled(script, "--", "--devices", "cpu:1")
    assert code == 0, err
    assert "1 stage on 1 device" in out
    code, out, err = profiled(script, "--box", "h100x8")
    assert code == 0, err
    assert "of what the box could do (MFU)" in " ".join(out.split())
    code, out, err = profiled(script, "--devices", "cpu:1")
    assert (code, out) == (2, "")
    assert "--devices must stand behind -- for a script" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print('trains nothing')", "train.py must take two steps of a pykern.Pipeline by step"),
        (SCRIPT.replace("range(5)", "range(1)"), "must take two steps of a pykern.Pipeline by st"),
    ],
)
def test_a_script_without_two_steps_is_told(tmp_path: Path, text: str, told: str) -> None:
    code, _, err = profiled(str(written(tmp_path, text)))
    assert code == 2
    assert told in err


def test_an_error_of_the_script_ends_with_its_traceback(tmp_path: Path) -> None:
    script = written(tmp_path, SCRIPT.replace("    optimizer.step()", "    raise KeyError('own')"))
    result = CliRunner().invoke(app, ["profile", str(script)])
    assert result.exit_code == 1
    # A process of tests may be handling another exception, which is told before.
    _, traceback = result.stderr.rsplit("Traceback (most recent call last):\n", 1)
    place, *_, last = traceback.splitlines()
    assert f"line {line_with(script, 'KeyError')}" in place
    assert last == "KeyError: 'own'"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frob", "3"], "a model must be given without arguments, got --frob"),
        (["no.such:model", "3"], "a model must be given without arguments, got 3"),
        (["--nsys", "step.nsys-rep"], "--nsys must be given with a script, got no script"),
        (["none.py"], "script must be a file, got none.py"),
    ],
)
def test_what_is_for_scripts_is_refused_without_one(arguments: list[str], told: str) -> None:
    code, out, err = profiled(*arguments)
    assert (code, out) == (2, "")
    assert told in err


def test_nsys_records_the_script_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool in the place of nsys: it notes its command, and leaves nothing."""
    tool = tmp_path / "nsys"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/command\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    script = written(tmp_path, SCRIPT)
    code, _, err = profiled("--nsys", str(tmp_path / "a.nsys-rep"), str(script), "--lr", "0.5")
    assert code == 2
    assert "nsys must leave a recording of" in err
    command = (tmp_path / "command").read_text()
    assert command.startswith("profile --trace=nvtx")
    assert "--duration=60 --kill=sigterm" in command
    assert command.endswith(f"{script} --lr 0.5\n")

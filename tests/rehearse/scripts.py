"""Runs of scripts, by `pykern rehearse` and by Python alone, each in a process of its own."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import programs

ROOT = Path(__file__).parents[2]

MAIN = "from pykern.cli import main; main()"
# Runs a script and writes the losses of its first steps.
PLAIN = """
import json, runpy, sys
import pykern
losses, step = [], pykern.Pipeline.step
def noted(*args, **named):
    if len(losses) == {steps}:
        raise SystemExit
    losses.append(step(*args, **named))
    return losses[-1]
pykern.Pipeline.step = noted
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("losses", json.dumps([float(loss) for loss in losses]))
"""


class Ended(NamedTuple):
    status: int
    out: str
    err: str
    seen: Any


def rehearse(
    script: Path, folder: Path, *arguments: str, box: str = "2x4090", options: Sequence[str] = ()
) -> Ended:
    into = folder / "seen.json"
    command = ["rehearse", str(script), "--box", box, *options, "--json", str(into), "--"]
    done = programs.run(MAIN, *command, *arguments, timeout=240, folder=folder)
    seen = json.loads(into.read_text()) if into.exists() else None
    return Ended(done.returncode, done.stdout, done.stderr, seen)


def plain_losses(script: Path, folder: Path, *arguments: str, steps: int = 3) -> list[float]:
    program = PLAIN.format(steps=steps)
    done = programs.run(program, str(script), *arguments, timeout=240, folder=folder)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    found: list[float] = json.loads(told.removeprefix("losses "))
    assert len(found) == steps
    return found


def written(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


def line_with(script: Path, text: str) -> int:
    """The number of the one line that has the text."""
    (number,) = [n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line]
    return number

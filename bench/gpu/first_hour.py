"""The commands of a first hour on GPUs (docs/gpus.md), side by side: seconds of each.

The first of them on a real GPU found that every command crashed on import, and `tune` in its first
line: neither shows where pykern is imported behind torch and a pipeline, as in the other sections.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .frame import Json, tail

COMMANDS = {
    "doctor": ("doctor",),
    "topo": ("topo",),
    "verify": ("verify", "--devices", "cuda:0/4"),
    "demo": ("demo", "--devices", "cuda", "--steps", "60"),
    "profile": ("profile", "--devices", "cuda:0/4"),
    "tune": ("tune", "--devices", "cuda"),
    "box": ("bench", "box", "--devices", "cuda", "--seconds", "20"),
}


def run(folder: Path) -> Json:
    return seconds_of(COMMANDS, folder)


def control() -> bool:
    """A command that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            seconds_of({"plan": ("plan", "no_such_schedule")}, Path(scratch))
        except RuntimeError as error:
            return "no_such_schedule" in str(error)
    return False


def seconds_of(commands: Mapping[str, Sequence[str]], folder: Path) -> Json:
    """Runs commands of pykern at once; raises RuntimeError with the output of those that fail."""
    pykern = Path(sys.executable).with_name("pykern")
    begun = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, arguments in commands.items():
            with (folder / f"first_hour-{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    [pykern, *arguments], cwd=scratch, stdout=log, stderr=subprocess.STDOUT
                )
        while left := running.keys() - seconds.keys():
            time.sleep(0.1)
            ended = (name for name in left if running[name].poll() is not None)
            seconds |= dict.fromkeys(ended, round(time.monotonic() - begun, 1))
    codes = {name: process.returncode for name, process in running.items()}
    if any(codes.values()):
        ends = (_end(name, code, folder) for name, code in codes.items() if code != 0)
        raise RuntimeError("\n".join(ends))
    return seconds


def _end(name: str, code: int, folder: Path) -> str:
    return f"{name} ended with {code}: {tail(folder / f'first_hour-{name}.log')[-700:]}"

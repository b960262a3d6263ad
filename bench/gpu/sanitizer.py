"""compute-sanitizer over a few steps of each way to run them: memcheck and racecheck."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .frame import ROOT, Json

TOOLS = ("memcheck", "racecheck")
# Without backtraces of the host. For these it keeps frames of Python, and with them the graphs of
# autograd in their variables: weights are then in graphs that live, and no step can be captured.
OF_HOST = ("--show-backtrace", "device")
# memcheck counts in the first form, racecheck in the second.
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: .*\((\d+) errors?, .*\)")


def run(folder: Path) -> Json:
    found = {tool: checked(tool, folder) for tool in TOOLS}
    if any(of_tool["failed"] for of_tool in found.values()):
        raise RuntimeError(f"steps failed: {found}")
    return found


def control() -> bool:
    """A kernel that writes beyond its memory, and one whose threads race."""
    return all(errors_in(under(tool, "planted", tool).stdout) for tool in TOOLS)


def under(tool: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A module of bench.gpu, with its arguments, under the tool."""
    program = [sys.executable, "-m", f"bench.gpu.{module}", *arguments]
    return subprocess.run(
        ["compute-sanitizer", "--tool", tool, *OF_HOST, *program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def checked(tool: str, folder: Path) -> Json:
    done = under(tool, "each_once")
    (folder / f"{tool}.log").write_text(done.stdout)
    errors = errors_in(done.stdout)
    if errors is None or done.returncode != 0:
        raise RuntimeError(f"{tool} ended with {done.returncode}: {done.stdout[-2000:]}")
    steps = {
        word: re.findall(rf"^{word} (.*)$", done.stdout, re.MULTILINE) for word in ("ran", "failed")
    }
    return {"errors": errors, **steps}


def errors_in(output: str) -> int | None:
    """The tool's count; None where it says nothing, as when it could not begin."""
    counts = [int(first or second) for first, second in SUMMARY.findall(output)]
    return sum(counts) if counts else None

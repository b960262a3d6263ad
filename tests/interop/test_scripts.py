"""A script for torchrun, and what becomes of it: three lines are other, and nothing it computes."""

import difflib
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop import launch

SCRIPTS = Path(__file__).parent / "scripts"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_in_processes(script: Path, *args: str) -> None:
    command = [sys.executable, launch.__file__, "2", free_port(), str(script), *args]
    processes = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = processes.communicate(timeout=50)
        assert processes.returncode == 0, said
    finally:
        with suppress(ProcessLookupError):
            os.killpg(processes.pid, signal.SIGKILL)


def changed(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in lines if line.startswith("+ ") and line[2:].strip()]


def test_three_lines_change() -> None:
    before, after = ((SCRIPTS / name).read_text() for name in ("before.py", "after.py"))
    assert changed(before.split('"""', 2)[2], after.split('"""', 2)[2]) == [
        "from pykern.interop.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe",
        "from pykern.interop.pipelining import ranks as dist",
        "    dist.run(main, 2, sys.argv[1])",
    ]


@pytest.mark.slow
def test_both_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_processes(SCRIPTS / "before.py", str(tmp_path / "before"))
    monkeypatch.setattr(sys, "argv", ["after.py", str(tmp_path / "after")])
    runpy.run_path(str(SCRIPTS / "after.py"), run_name="__main__")
    for rank in range(2):
        theirs, ours = (torch.load(tmp_path / f"{name}.{rank}") for name in ("before", "after"))
        expect_equal(ours, theirs, rank)


def expect_equal(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> None:
    assert ours.keys() == theirs.keys() == {"ScheduleGPipe", "Schedule1F1B"}
    for name, (seen, parameters) in ours.items():
        assert len(seen) == (0 if rank == 0 else 6)
        assert len(parameters) == 12
        # The number of microbatches is a power of two, so that dividing by it rounds nothing.
        torch.testing.assert_close((seen, parameters), theirs[name], rtol=0, atol=0)

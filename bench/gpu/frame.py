"""The frame around the sections: where they run, for how long, and how results are kept."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# By run, sections with the seconds that each may take, by worth: a machine may be taken away at any
# time, and the last sections are then missing. Each run builds, because it may be the first on its
# machine, and ends within nine minutes.
RUNS = {
    "correctness": {
        "build": 90,
        "tests": 150,
        "first_hour": 80,
        "raw_launch": 16,
        "capture_copy": 16,
        "pools": 16,
        "split_capture": 16,
        "green": 16,
        "driver_log": 80,
        "watch": 30,
        "profiler": 30,
        "stitch": 16,
        "sanitizer": 70,
    },
    "graphs": {
        "build": 90,
        "graph_step": 80,
        "no_waits": 20,
        "in_a_row": 30,
        "tight": 30,
        "makespan": 80,
        "copy_overlap": 60,
        "predicted": 50,
        "tuned": 60,
    },
    "speed": {
        "build": 90,
        "action_cpu": 20,
        "kernels": 120,
        "levels": 70,
        "peers": 95,
        "issue_rate": 20,
        "overlap": 28,
        "driver_costs": 16,
        "traffic": 50,
    },
}
SECTIONS = {name: limit_s for run in RUNS.values() for name, limit_s in run.items()}
# Those that ask what is right, and not how long it takes, share the machine: on an H100 the tests
# took two minutes, and these as long as the tests alone.
SIDE_BY_SIDE = RUNS["correctness"].keys() - {"build"}
# Under this a section is not worth starting: torch alone takes seconds to import.
LEAST_S = 15
# For a question about the machine.
ASK_S = 60
# Modules that sections import late, and programs, which have a hyphen.
_DRIVER = "cuda.bindings.driver"
NEEDS = {
    **dict.fromkeys(SECTIONS, (_DRIVER,)),
    "build": ("pip", "scikit_build_core", "pybind11"),
    "tests": ("pytest", "hypothesis", "triton"),
    "first_hour": ("typer", "rich"),
    "green": (_DRIVER, "cupy"),
    "watch": (_DRIVER, "cupy"),
    "sanitizer": ("compute-sanitizer", _DRIVER, "cupy"),
    "graph_step": (_DRIVER, "triton"),
    "action_cpu": (),
    "driver_log": (),
    "kernels": ("triton",),
    "levels": ("triton",),
    "predicted": (_DRIVER, "triton"),
    "tuned": ("triton",),
    "traffic": ("ncu", "triton"),
    "peers": ("triton",),
}
PACKAGES = ("torch", "cuda-bindings", "cupy-cuda13x", "triton", "numpy", "pykern-runtime")
SOURCES = ("csrc", "cmake", "CMakeLists.txt", "pyproject.toml", "pykern", "schedules", "bench")

Json = dict[str, Any]


def purpose(name: str) -> str:
    """The first line of a section's docstring. Importing it needs no GPU."""
    return _first_line(importlib.import_module(f"bench.gpu.{name}"))


def planted(name: str) -> str:
    """The fault that a section is given when it has run, and must notice."""
    return _first_line(importlib.import_module(f"bench.gpu.{name}").control)


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").partition("\n")[0]


def lacking(name: str) -> list[str]:
    """The needs of a section that cannot be imported or found, beside a device."""
    needs = [f"bench.gpu.{name}", *NEEDS[name]]
    return [why for need in needs if (why := _why_missing(need)) is not None]


def _why_missing(need: str) -> str | None:
    if "-" in need:
        return None if shutil.which(need) else need
    try:
        importlib.import_module(need)
    except Exception as error:
        return f"{need} ({type(error).__name__}: {error})".replace("\n", " ")
    return None


def has_device() -> bool:
    """Asked in another process: one that forks or sets variables later must not have begun CUDA."""
    ask = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    try:
        return subprocess.run(ask, check=False, timeout=ASK_S).returncode == 0
    except subprocess.TimeoutExpired:
        # A device that is slow to answer is there.
        return True


def digest() -> str:
    """Digest of the sources, because a copy of the tree may come without its git history."""
    found = hashlib.sha256()
    for source in SOURCES:
        path = ROOT / source
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.suffix in {".py", ".cpp", ".hpp", ".txt", ".toml", ".cmake"}:
                found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return found.hexdigest()[:16]


def environment() -> Json:
    return {
        "sources": digest(),
        "commit": output_of("git", "describe", "--always", "--dirty", "--exclude=*"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": output_of(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm",
            "--format=csv,noheader",
        ),
        "versions": {package: version_of(package) for package in PACKAGES},
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """The output of a command; None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=ASK_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def resume(path: Path, now: Json) -> Json:
    """The session so far, where the file is of the same sources; else a new one."""
    if path.exists():
        session: Json = json.loads(path.read_text())
        if session["environment"]["sources"] == now["sources"]:
            return session
    return {"environment": now, "sections": {}}


def save(path: Path, session: Json) -> None:
    """In one piece, so that a session cut off leaves a whole file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(session, indent=2) + "\n")
    partial.replace(path)


def batches(names: Iterable[str]) -> list[list[str]]:
    """Sections in their order, those in one list that run at the same time."""
    keys = ((name in SIDE_BY_SIDE or name, name) for name in names)
    return [[name for _, name in those] for _, those in groupby(keys, itemgetter(0))]


def run_sections(
    names: Sequence[str], folder: Path, left_s: float, stretch: float = 1.0
) -> Iterator[tuple[str, Json]]:
    """Runs sections at the same time, and gives each with its result when it has ended."""
    with ThreadPoolExecutor(len(names)) as threads:
        ends = {threads.submit(run_section, name, folder, left_s, stretch): name for name in names}
        try:
            for end in as_completed(ends):
                yield ends[end], end.result()
        except BaseException:
            # The end of the session waits for these threads, and they for their sections, one of
            # which may only now begin.
            while not all(end.done() for end in ends):
                for process in tuple(_running):
                    _end(process)
                time.sleep(0.05)
            raise


def run_section(name: str, folder: Path, left_s: float, stretch: float = 1.0) -> Json:
    """Runs a section in a process of its own. A failure is a result too.

    Args:
        name: of SECTIONS.
        folder: for files that are too large for the figures.
        left_s: seconds until the session ends.
        stretch: how much longer than in a session of all sections it may take.
    """
    allowance_s = min(SECTIONS[name] * stretch, left_s)
    if allowance_s < LEAST_S:
        return {"outcome": "not started", "error": f"{left_s:.0f} s were left"}
    start = time.monotonic()
    figures, log = folder.resolve() / f"{name}.json", folder / f"{name}.log"
    figures.unlink(missing_ok=True)
    # One that crashes tells where.
    command = [sys.executable, "-X", "faulthandler", "-m", "bench.gpu.one", name, str(figures)]
    code = run_alone(command, log, allowance_s)
    took_s = allowance_s if code is None else round(time.monotonic() - start, 1)
    if code == 0:
        return {"outcome": "ok", "figures": json.loads(figures.read_text()), "took_s": took_s}
    outcome = "out of time" if code is None else "failed"
    return {"outcome": outcome, "error": tail(log) or f"it ended with {code}", "took_s": took_s}


def run_alone(command: list[str], log: Path, limit_s: float) -> int | None:
    """Runs a command with all that it prints in a file; its exit code, or None after the limit.

    Nothing of it goes on: what it has started, and left, would hold the GPU.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
            process.wait()
            _running.discard(process)


# The processes of sections that run now, each in a session of its own.
_running: set[subprocess.Popen[bytes]] = set()


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def tail(log: Path) -> str:
    """The end of what a section, or a program of it, has printed."""
    return log.read_bytes()[-3000:].decode(errors="replace")


def summary(name: str, result: Json) -> str:
    """One line; the figures themselves are in the file."""
    shown = json.dumps(result["figures"]) if "figures" in result else result["error"].strip()
    last_line = shown.splitlines()[-1] if shown else ""
    return f"{name:15} {result['outcome']:12} {result.get('took_s', 0):6.1f} s  {last_line[:150]}"

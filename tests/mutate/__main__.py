"""Breaks the GPU path on purpose, one place at a time, and says whether the tests notice.

    python -m tests.mutate                 all mutants, in about an hour on two cores
    python -m tests.mutate streams.cpp     those of files whose path ends so
    python -m tests.mutate --save          keeps the outcomes for docs/reliability.md, as they come
    python -m tests.mutate --rest --save   those of which no outcome is kept

Each mutant of the tables is put into a copy of the tree, `build/mutate`, where C++ is built for its
own tests alone, and the tests that the table names are run until one fails. A mutant that survives
must be proven harmless in the table. Tests that take several times as long as without a mutant are
run once more without it: only if they end in time, the mutant makes them hang.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.report import environment

from .mutant import Mutant
from .of_capture import OF_CAPTURE
from .of_draws import OF_DRAWS
from .of_exec import OF_EXEC
from .of_issuing import OF_ISSUING
from .of_plan import OF_PLAN
from .of_rings import OF_RINGS
from .of_short_steps import OF_SHORT_STEPS
from .of_stages import OF_STAGES
from .of_watch import OF_WATCH

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutate"
RESULTS = Path(__file__).with_name("results.json")
MUTANTS: tuple[Mutant, ...] = (
    *OF_EXEC,
    *OF_ISSUING,
    *OF_SHORT_STEPS,
    *OF_PLAN,
    *OF_WATCH,
    *OF_RINGS,
    *OF_CAPTURE,
    *OF_STAGES,
    *OF_DRAWS,
)
# A test of pytest takes seconds, a build minutes, on a busy machine several times as long.
TEST_LIMIT_S = 240
LIMIT_S = 900
# Tests of a mutant may take so many times as long as without it, and this long in any case. The
# tests of C++ have no limit of their own.
SLOWER = 5
SHORTEST_S = 60
LATE = "takes too long"
# How pytest and doctest name a test that fails, and Python a crash. A test that cannot be imported
# has no "::".
FAILED = re.compile(
    r"^(?:(?:FAILED|ERROR) (\S+::\S*).*|TEST CASE: +(.*)|(Fatal Python error: .*|terminate .*))$",
    re.MULTILINE,
)
# An editable install would find the package in the tree that was copied.
PYTEST = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, ".")
import pykern, pytest
assert pykern.__file__.startswith(sys.argv[1]), pykern.__file__
options = ["-xq", "-p", "no:cacheprovider", f"--timeout={sys.argv[2]}"]
sys.exit(pytest.main([*options, *sys.argv[3:]]))
"""


def copy_tree() -> None:
    """Makes the copy as the tree is; what was built in it is kept."""
    listed = ["git", "ls-files", "-coz", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        source, into = ROOT / name, COPY / name
        into.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            into.unlink(missing_ok=True)
            into.symlink_to(source.readlink())
        elif source.exists() and not (into.exists() and into.read_bytes() == source.read_bytes()):
            shutil.copy(source, into)
    from pykern import _C  # noqa: PLC0415 - the table is looked at without it

    shutil.copy(_C.__file__, COPY / "pykern")
    for shared in ("fake_cuda", "device_oracle"):
        (COPY / "build").mkdir(exist_ok=True)
        (ROOT / "build" / shared).mkdir(parents=True, exist_ok=True)
        if not (COPY / "build" / shared).exists():
            (COPY / "build" / shared).symlink_to(ROOT / "build" / shared)


def failure_of(*command: str | Path, limit_s: float = LIMIT_S) -> str | None:
    """The output of a command in the copy, if it fails, or `LATE`; None if it succeeds."""
    process = subprocess.Popen(
        ["nice", *map(str, command)],
        cwd=COPY,
        env=os.environ | {"LD_LIBRARY_PATH": str(COPY / "build/debug/tests/csrc")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return LATE
    if process.returncode == 0:
        return None
    return LATE if "from pytest-timeout" in printed else printed


def failure_to_build() -> str | None:
    """Builds the tests of C++ as the copy is now."""
    build = ("cmake", "--build", "--preset", "debug", "--target", "pykern_tests")
    return failure_of("cmake", "--preset", "debug", "-DPYKERN_WERROR=OFF") or failure_of(*build)


def failure_of_tests(mutant: Mutant, limit_s: float = LIMIT_S) -> str | None:
    """Runs the tests that the table names, until one fails."""
    if mutant.is_cpp:
        files = ",".join(f"*{name}" for name in mutant.tests)
        tests = ("build/debug/tests/csrc/pykern_tests", f"-sf={files}", "-aa=1")
        return failure_of(*tests, limit_s=limit_s)
    pytest = (sys.executable, "-c", PYTEST, COPY, str(TEST_LIMIT_S))
    return failure_of(*pytest, *mutant.tests, limit_s=limit_s)


def outcome_of(mutant: Mutant, limit_s: float) -> tuple[str, str]:
    """Puts a mutant into the copy, runs its tests, and takes it out.

    Args:
        mutant: of the tables.
        limit_s: the time of its tests.

    Returns:
        The outcome, and the test that has noticed the mutant.
    """
    path = COPY / mutant.file
    text = path.read_text()
    path.write_text(mutant.of(text))
    try:
        if mutant.is_cpp and failure_to_build() is not None:
            return "does not build", ""
        failure = failure_of_tests(mutant, limit_s)
    finally:
        path.write_text(text)
    if failure is None:
        return "survived", ""
    if failure != LATE:
        named = FAILED.search(failure)
        return ("killed", named[named.lastindex or 0]) if named else ("fails elsewhere", "")
    if mutant.is_cpp:
        failure_to_build()
    if failure_of_tests(mutant, limit_s) is None:
        return "killed", LATE
    return "machine too slow", ""


def is_as_said(outcome: str, mutant: Mutant) -> bool:
    """All are killed but those that are proven harmless."""
    return outcome == ("survived" if mutant.harmless else "killed")


def limits_of_tests(mutants: Iterable[Mutant]) -> dict[tuple[str, ...], float]:
    """The seconds that the tests of mutants may take, which are run once without a mutant.

    Ends the program if they fail then, because they prove nothing.
    """
    by_tests = {mutant.tests: mutant for mutant in mutants}
    if any(mutant.is_cpp for mutant in by_tests.values()) and (failure := failure_to_build()):
        sys.exit(f"the copy does not build: {failure[-2000:]}")
    limits = {}
    for tests, mutant in by_tests.items():
        start = time.monotonic()
        if failure := failure_of_tests(mutant):
            sys.exit(f"{tests} fail as they are: {failure[-2000:]}")
        limits[tests] = max(SHORTEST_S, SLOWER * (time.monotonic() - start))
    return limits


def kept() -> dict[str, Any]:
    """The outcomes that are kept, by the names of mutants."""
    return dict(json.loads(RESULTS.read_text())["outcomes"]) if RESULTS.exists() else {}


def save(name: str, outcome: dict[str, Any]) -> None:
    """Adds an outcome to those of other mutants; those of mutants that are gone go."""
    names = {mutant.name for mutant in MUTANTS}
    found = kept() | {name: outcome}
    outcomes = {name: found[name] for name in sorted(names & found.keys())}
    content = {"environment": environment("python -m tests.mutate --save"), "outcomes": outcomes}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.mutate", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="file", help="the end of a path")
    parser.add_argument("--save", action="store_true", help="keep the outcomes")
    parser.add_argument("--rest", action="store_true", help="only those without an outcome")
    options = parser.parse_args()
    ends = tuple(options.files) or ("",)
    left_out = kept() if options.rest else {}
    mutants = [m for m in MUTANTS if m.file.endswith(ends) and m.name not in left_out]
    copy_tree()
    limits = limits_of_tests(mutants)
    wrong = 0
    for mutant in mutants:
        start = time.monotonic()
        outcome, noticed_by = outcome_of(mutant, limits[mutant.tests])
        took_s = round(time.monotonic() - start, 1)
        said = "" if is_as_said(outcome, mutant) else "  UNEXPECTED"
        wrong += bool(said)
        print(f"{outcome:14} {took_s:6.1f} s  {mutant.name}{said}  {noticed_by}", flush=True)
        if options.save and outcome in ("killed", "survived"):
            save(mutant.name, {"outcome": outcome, "seconds": took_s, "by": noticed_by})
    print(f"{len(mutants)} mutants, {wrong} not as the table says")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())

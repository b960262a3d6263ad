"""Runs the tests that are marked gpu."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .frame import ROOT, Json

# Without the project's settings, some of which need plugins that a machine with a GPU may lack.
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-c", os.devnull),
    *(f"--rootdir={ROOT}", "--import-mode=importlib"),
)


def run(folder: Path) -> Json:
    return passed("tests/gpu", folder)


def control() -> bool:
    """A test that fails."""
    with tempfile.TemporaryDirectory() as scratch:
        planted = Path(scratch) / "test_planted.py"
        planted.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    assert False\n")
        try:
            passed(str(planted), Path(scratch))
        except RuntimeError as error:
            return "1 failed" in str(error)
    return False


def side_by_side() -> list[str]:
    """Options for several processes, where pytest-xdist is installed."""
    return ["-n", "6"] if importlib.util.find_spec("xdist") else []


def passed(tests: str, folder: Path) -> Json:
    """Raises RuntimeError if a test fails, or all are skipped."""
    log = folder / "pytest.log"
    # As it comes, because a test that hangs takes the rest of the section along.
    with log.open("w") as file:
        done = subprocess.run(
            [*_PYTEST, *side_by_side(), "-m", "gpu", "-v", "-p", "no:cacheprovider", tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    printed = log.read_text()
    summary = printed.strip().rpartition("\n")[2]
    if done.returncode != 0 or " passed" not in summary:
        raise RuntimeError(printed[-2000:])
    return {"summary": summary}

"""Runs the tests that are marked gpu."""

import os
import subprocess
import sys
from pathlib import Path

from .frame import ROOT, Json

# Without the project's settings, some of which need plugins that a machine with a GPU may lack.
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-c", os.devnull),
    *(f"--rootdir={ROOT}", "--import-mode=importlib"),
)


def run(folder: Path) -> Json:
    log = folder / "pytest.log"
    # As it comes, because a test that hangs takes the rest of the section along.
    with log.open("w") as file:
        done = subprocess.run(
            [*_PYTEST, "-m", "gpu", "-v", "-p", "no:cacheprovider", "tests/gpu"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    printed = log.read_text()
    if done.returncode != 0:
        raise RuntimeError(printed[-2000:])
    return {"summary": printed.strip().splitlines()[-1]}

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
    done = subprocess.run(
        [*_PYTEST, "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "tests.log").write_text(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])
    return {"summary": done.stdout.strip().splitlines()[-1]}

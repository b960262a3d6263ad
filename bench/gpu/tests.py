"""Runs the tests that are marked gpu."""

import subprocess
import sys
from pathlib import Path

from .frame import ROOT, Json


def run(folder: Path) -> Json:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "tests.log").write_text(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:])
    return {"summary": done.stdout.strip().splitlines()[-1]}

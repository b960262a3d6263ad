"""A machine without a CUDA driver: what Python is told, and when."""

import subprocess
import sys
from pathlib import Path

LOAD = """
import pykern._C
try:
    pykern._C.CudaDriver()
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def load_with(library: Path) -> str:
    """What a fresh interpreter says whose loader finds this file for libcuda.so.1."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={"LD_LIBRARY_PATH": str(library.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def test_a_missing_driver_is_an_error_when_it_is_asked_for_and_not_before(tmp_path):
    # An empty file stops the search, so that a driver of this machine is not found either.
    library = tmp_path / "libcuda.so.1"
    library.touch()
    said = load_with(library)
    assert said.startswith("RuntimeError no CUDA driver: ")
    assert "libcuda.so.1: file too short" in said

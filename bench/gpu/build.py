"""Builds pykern here, without isolation and without fetching anything."""

import subprocess
import sys
from pathlib import Path

from .frame import ROOT, Json


def run(folder: Path) -> Json:
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    # Its output is the section's.
    subprocess.run([*command, "--no-index", "--editable", "."], cwd=ROOT, check=True)
    nvtx, _, file = told("_C.nvtx_built, _C.__file__").partition(" ")
    return {"nvtx_built": nvtx == "True", "extension": Path(file).name}


def control() -> bool:
    """An extension that lacks a name."""
    try:
        told("_C.not_built")
    except subprocess.CalledProcessError:
        return True
    return False


def told(values: str) -> str:
    """Values of the extension, in a fresh interpreter: this one began before it was there."""
    ask = [sys.executable, "-c", f"from pykern import _C; print({values})"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()

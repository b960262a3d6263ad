"""Builds pykern here, without isolation and without fetching anything."""

import subprocess
import sys
from pathlib import Path

from .frame import ROOT, Json


def run(folder: Path) -> Json:
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps"]
    # Its output is the section's.
    subprocess.run([*command, "--no-index", "--editable", "."], cwd=ROOT, check=True)
    # A fresh interpreter, as this one began before the package was there.
    ask = "from pykern import _C; print(_C.nvtx_built, _C.__file__)"
    built = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    nvtx, _, file = built.stdout.strip().partition(" ")
    return {"nvtx_built": nvtx == "True", "extension": Path(file).name}

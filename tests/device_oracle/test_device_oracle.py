"""Steps, captures and loops on GPUs, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.fake import ROOT


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA of its own")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["steps_on_gpus.py", "captures_on_gpus.py", "loops_on_gpus.py", "boxes_on_gpus.py"]
)
def test_torchs_own_engine_runs(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-qx", "-n0", "-p", "no:cacheprovider"]
    steps = Path(__file__).with_name(name)
    done = subprocess.run([*command, steps], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

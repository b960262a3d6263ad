"""Memory that a step frees is there for the next one, without the system's help."""

import os
import subprocess
import sys
from ctypes.util import find_library

import pytest

_STEPS = """
import resource
import torch
import pykern
from torch import nn

torch.set_num_threads(1)
layers = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(256, 256), nn.ReLU())))
x = torch.randn(2048, 256)
pipe = pykern.Pipeline(
    layers, devices="cpu:2", schedule="gpipe", microbatches=2, loss_fn=nn.functional.mse_loss
)
for _ in range(8):
    pipe.step(x, target=x)
faults = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pipe.step(x, target=x)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[4])
pipe.close()
"""

pytestmark = pytest.mark.skipif(find_library("c") != "libc.so.6", reason="another C library")


def faults_of_a_step(**settings: str) -> int:
    """Pages that the system gives the process in the median step, which uses five thousand."""
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS],
        env=inherited | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_step_takes_no_memory_from_the_system() -> None:
    assert faults_of_a_step() < 256


@pytest.mark.parametrize(
    "settings",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=str,
)
def test_what_the_user_has_set_stays(settings: dict[str, str]) -> None:
    assert faults_of_a_step(**settings) > 2000

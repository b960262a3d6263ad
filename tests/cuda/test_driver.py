"""Python's view of the CUDA driver, which is the fake one here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pykern import _C

LOAD = """
import pykern._C
try:
    pykern._C.cuda_devices()
except RuntimeError as error:
    print(type(error).__name__, error)
"""


OLDER = """
import pykern._C
from tests.fake_cuda.fake import FakeCuda
FakeCuda().set_driver_version(12020)
print(pykern._C.cuda_version(), len(pykern._C.cuda_devices()))
"""


def load_with(library: Path) -> str:
    """The output of a fresh interpreter whose loader finds this file for libcuda.so.1."""
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


def test_the_driver_tells_its_devices(fake_cuda):
    assert _C.cuda_version() == "13.0"
    assert _C.cuda_devices() == [("fake device 0", 132), ("fake device 1", 132)]
    assert _C.cuda_can_access_peer(0, 1)
    fake_cuda.set_peer(0, 1, False)
    assert not _C.cuda_can_access_peer(0, 1)


@pytest.mark.parametrize("device", [-1, 2])
def test_a_device_that_is_not_there_is_named(fake_cuda, device):
    with pytest.raises(IndexError, match=f"no device cuda:{device}: the driver has 2 devices"):
        _C.cuda_can_access_peer(0, device)


def test_a_call_that_fails_is_named_with_its_number(fake_cuda):
    fake_cuda.fail("cuDeviceCanAccessPeer", 1, 100)
    with pytest.raises(_C.CudaError) as caught:
        _C.cuda_can_access_peer(0, 1)
    assert caught.value.call == "cuDeviceCanAccessPeer"
    assert caught.value.code == 100
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == (
        "cuDeviceCanAccessPeer: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected"
    )


def test_a_driver_too_old_for_sm_groups_serves_all_else():
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", OLDER], cwd=root, capture_output=True, text=True, check=True
    )
    assert run.stdout == "12.2 2\n"


# Host functions that call Python deadlock; copies by peer or in batches cannot be captured; values
# that streams wait for are an order that the driver does not see.
NEVER_CALLED = (
    *("cuLaunchHostFunc", "cuStreamAddCallback", "cuMemcpyPeerAsync", "cuMemcpyBatchAsync"),
    *("cuStreamWaitValue32", "cuStreamWriteValue32", "cuCtxCreate"),
)
# Their stream is of the GPU that is current first, and they wait for all GPUs each time.
NEVER_USED = ("torch.cuda.graph(", "make_graphed_callables", "GreenContext")


def test_what_cannot_be_relied_on_is_not_called():
    root = Path(__file__).parents[2]
    functions = re.findall(r"X\((\w+), \d+", (root / "csrc/cuda/api.hpp").read_text())
    assert len(functions) > 40
    assert not set(NEVER_CALLED) & set(functions)
    for path in (root / "pykern").rglob("*.py"):
        text = path.read_text()
        assert not [name for name in NEVER_USED if name in text], path

"""The fake driver by its Python face; tests/csrc/test_fake_*.cpp provoke its checks one by one."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.shared_library import ROOT, compiler
from tests.fake_cuda.fake import FakeCuda

Bytes = ctypes.Array[ctypes.c_char]
SIZE = 16


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """Without the checks in the end: what breaks a rule here does so on purpose."""
    fake = FakeCuda()
    yield fake
    fake.close()
    assert fake.leaks == []


def copy(fake: FakeCuda, to: Bytes, source: Bytes, stream: int) -> None:
    addresses = (ctypes.c_uint64(ctypes.addressof(memory)) for memory in (to, source))
    fake.call("cuMemcpyAsync", *addresses, ctypes.c_size_t(SIZE), ctypes.c_void_p(stream))


def memory(fake: FakeCuda, stream: int, text: bytes = b"") -> Bytes:
    made = ctypes.create_string_buffer(text, SIZE)
    fake.alloc(ctypes.addressof(made), SIZE, stream)
    return made


# As on a machine with a driver, which a torch for CUDA has loaded already.
BESIDE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from pykern import _C
from tests.fake_cuda.fake import FakeCuda
FakeCuda(num_devices=3)
print(len(_C.cuda_devices()))
_C.use_cuda_driver("libcuda.so.1")
try:
    _C.cuda_devices()
except RuntimeError as error:
    print(error)
FakeCuda(num_devices=2)
print(len(_C.cuda_devices()))
"""


def test_the_fake_is_reached_where_another_driver_is_loaded(tmp_path):
    decoy = tmp_path / "decoy.so"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", str(decoy)]
    subprocess.run([*compiler(), *flags], input="", text=True, check=True)
    run = subprocess.run(
        [sys.executable, "-c", BESIDE, str(decoy)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    fake, other, again = run.stdout.splitlines()
    assert (fake, again) == ("3", "2")
    assert other.startswith("the CUDA driver is too old: libcuda.so.1 has no cuGetProcAddress")


# As where a traceback holds what a rehearsal has made.
OUTLIVES = """
from pykern import _C
from tests.fake_cuda.fake import FakeCuda
FakeCuda(num_devices=1)
lanes = _C.Lanes([(0, 0, 1)])
_C.use_cuda_driver("libcuda.so.1")
del lanes
_C.destroy_idle_streams()
print("went on")
"""


def test_objects_may_outlive_the_choice_of_their_driver():
    command = [sys.executable, "-c", OUTLIVES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("went on\n", 0), run.stderr


def test_a_copy_runs_when_it_is_completed(fake_cuda):
    fake_cuda.set_eagerness(0)
    stream = fake_cuda.stream(0)
    source, slot = memory(fake_cuda, stream, b"sent"), memory(fake_cuda, stream)
    copy(fake_cuda, slot, source, stream)
    assert slot.value == b""
    fake_cuda.complete(stream)
    assert slot.value == b"sent"


def test_a_missing_wait_is_told_with_both_works_and_the_range(fake):
    sender, receiver = fake.stream(0), fake.stream(1)
    source, slot = memory(fake, sender), memory(fake, receiver)
    copy(fake, slot, source, sender)
    fake.kernel(receiver, reads=[(ctypes.addressof(slot), SIZE)])
    start = ctypes.addressof(slot)
    assert fake.violations == [
        f"fake_kernel: race on [{start:#x}, {start + SIZE:#x}): "
        "fake_kernel, work 1 of stream 1 on device 1 reads what "
        "cuMemcpyAsync, work 1 of stream 0 on device 0 writes, and nothing orders the two"
    ]


def test_a_graph_calls_python_when_it_runs_and_may_free_memory(fake_cuda):
    fake_cuda.set_eagerness(0)
    stream = fake_cuda.stream(1)
    source, slot = memory(fake_cuda, stream, b"sent"), memory(fake_cuda, stream)
    seen = []

    def run() -> None:
        seen.append(slot.value)
        fake_cuda.free(ctypes.addressof(source))

    graph = fake_cuda.graph(run, reads=[(ctypes.addressof(slot), SIZE)])
    executable = fake_cuda.instantiate(graph)
    copy(fake_cuda, slot, source, stream)
    fake_cuda.call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))
    assert seen == []
    fake_cuda.call("cuStreamSynchronize", ctypes.c_void_p(stream))
    assert seen == [b"sent"]


def test_a_call_fails_where_the_test_says_so(fake):
    stream = fake.stream(0)
    fake.fail("cuStreamSynchronize", 1, 700, sticky=True)
    with pytest.raises(RuntimeError, match="cuStreamSynchronize failed with 700"):
        fake.call("cuStreamSynchronize", ctypes.c_void_p(stream))
    assert fake.result("cuStreamSynchronize", ctypes.c_void_p(stream)) == 700
    assert fake.calls("cuStreamSynchronize") == 2
    assert fake.violations == []
    with pytest.raises(AssertionError, match="no function cuMadeUp"):
        fake.call("cuMadeUp")


def test_what_is_not_given_back_is_told(fake):
    assert fake.leaks == []
    fake.retain(1)
    assert fake.leaks == ["primary context of device 1, retained 1 times"]


def test_closing_waits_for_the_work_of_streams_that_are_destroyed(fake):
    fake.set_eagerness(0)
    fake.retain(0)
    seen = []
    executable = fake.instantiate(fake.graph(lambda: seen.append("ran")))
    stream = ctypes.c_void_p()
    fake.call("cuStreamCreateWithPriority", ctypes.byref(stream), ctypes.c_uint(1), ctypes.c_int(0))
    fake.call("cuGraphLaunch", ctypes.c_void_p(executable), stream)
    fake.call("cuStreamDestroy", stream)
    assert seen == []
    fake.close()
    assert seen == ["ran"]
    assert fake.violations == []

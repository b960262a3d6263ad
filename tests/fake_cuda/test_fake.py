"""The fake driver by its Python face; tests/csrc/test_fake_*.cpp provoke its checks one by one."""

import ctypes
from collections.abc import Iterator

import pytest

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


def test_a_process_that_asks_for_the_driver_gets_the_fake(fake_cuda):
    assert ctypes.CDLL("libcuda.so.1")._handle == fake_cuda.library._handle


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

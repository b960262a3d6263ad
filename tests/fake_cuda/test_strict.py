"""Rules of a GPU's driver that no step may meet: waits of the host, captures, contexts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from tests.fake_cuda.fake import FakeCuda, accesses_of

SIZE = 16
RELAXED = 2
CAPTURE = 900
PLACE = 0x1000, SIZE


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda(num_devices=2)
    made.allow_undeclared()
    made.set_eagerness(0)
    yield made
    made.library.fake_let_go(0)
    made.library.fake_set_capturing(0)
    made.close()


class Copy:
    """A buffer of device 0 and one of the host, and copies between them.

    Args:
        fake: the driver.
        pinned: whether the buffer of the host is.
    """

    def __init__(self, fake: FakeCuda, *, pinned: bool) -> None:
        self.stream, self._fake = fake.stream(0), fake
        self.device, self.host = (ctypes.create_string_buffer(b"x", SIZE) for _ in range(2))
        for buffer in (self.device, self.host):
            fake.alloc(ctypes.addressof(buffer), SIZE, self.stream)
        fake.place_on_host(ctypes.addressof(self.host), pinned=pinned)

    def run(self, *, to_host: bool) -> int:
        into, source = (self.host, self.device) if to_host else (self.device, self.host)
        given = (ctypes.addressof(into), ctypes.addressof(source), SIZE, self.stream)
        return self._fake.result("cuMemcpyAsync", *map(ctypes.c_void_p, given))


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_host_waits_for_a_copy_of_memory_that_is_not_pinned(
    fake: FakeCuda, pinned: bool, to_host: bool
) -> None:
    copy = Copy(fake, pinned=pinned)
    source, into = (copy.device, copy.host) if to_host else (copy.host, copy.device)
    source.value = b"sent"
    assert copy.run(to_host=to_host) == 0
    assert into.value == (b"x" if pinned else b"sent")
    assert fake.library.fake_pageable_copies() == (not pinned)
    assert fake.violations == []


def test_the_host_knows_of_what_has_come_to_it_and_not_of_what_has_left(fake: FakeCuda) -> None:
    """The driver may have taken bytes that leave into memory of its own."""
    copy, other = Copy(fake, pinned=False), fake.stream(1)
    place = ctypes.addressof(copy.device), SIZE
    assert copy.run(to_host=True) == 0
    fake.kernel(other, writes=[place])
    assert fake.violations == []
    fake.order(other, copy.stream)
    assert copy.run(to_host=False) == 0
    fake.kernel(other, reads=[place])
    assert len(fake.forgive()) == 1


def lent(fake: FakeCuda) -> Copy:
    """A copy under way from pinned memory, which the host may not change."""
    copy = Copy(fake, pinned=True)
    assert copy.run(to_host=False) == 0
    fake.lend(copy.stream, ctypes.addressof(copy.host), SIZE)
    return copy


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_may_change_what_a_copy_has_read(fake: FakeCuda, waits: bool) -> None:
    copy = lent(fake)
    # The copy has run, which the host does not know.
    fake.run_all()
    if waits:
        fake.call("cuStreamSynchronize", ctypes.c_void_p(copy.stream))
    copy.host.value = b"changed"
    told = [] if waits else ["fake_violations: the host has changed bytes that cuMemcpyAsync"]
    assert [text[: text.index("Async") + 5] for text in fake.forgive()] == told
    assert fake.violations == []


def test_work_may_change_what_a_copy_before_it_has_read(fake: FakeCuda) -> None:
    copy = lent(fake)
    copy.device.value = b"other"
    assert copy.run(to_host=True) == 0
    fake.run_all()
    assert fake.violations == []


def test_a_copy_that_waits_for_what_hangs_is_told(fake: FakeCuda) -> None:
    copy = Copy(fake, pinned=False)
    fake.hang("fake_kernel")
    fake.kernel(copy.stream)
    copy.run(to_host=True)
    (told,) = fake.forgive()
    assert told == "cuMemcpyAsync: the host waits for work that hangs"


def test_a_launch_waits_for_room_in_a_full_queue(fake: FakeCuda) -> None:
    fake.library.fake_set_queue(4)
    ran: list[int] = []
    stream = fake.stream(0)
    graphs = [fake.instantiate(fake.graph(lambda n=n: ran.append(n))) for n in range(6)]  # type: ignore[misc]
    for number, graph in enumerate(graphs):
        assert fake.library.fake_full_queues() == max(number - 4, 0)
        fake.call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))
    assert ran == [0, 1]
    # Room is no order: the host has not waited for the work itself.
    fake.kernel(stream, writes=[PLACE])
    fake.kernel(fake.stream(1), reads=[PLACE])
    assert [told for told in fake.forgive() if "race" in told]
    fake.call("cuStreamSynchronize", ctypes.c_void_p(stream))
    assert ran == list(range(6))


def test_a_full_queue_runs_what_it_waits_for_on_other_streams(fake: FakeCuda) -> None:
    fake.library.fake_set_queue(2)
    first, second = fake.stream(0), fake.stream(1)
    fake.kernel(first, writes=[PLACE])
    fake.order(first, second)
    for _ in range(5):
        fake.kernel(second, reads=[PLACE])
    assert fake.library.fake_full_queues() > 0
    assert fake.violations == []


def test_a_queue_that_is_full_behind_work_that_hangs_is_told_and_not_waited_for(
    fake: FakeCuda,
) -> None:
    fake.library.fake_set_queue(3)
    stream = fake.stream(0)
    fake.hang("fake_kernel")
    for _ in range(3):
        fake.kernel(stream)
    assert fake.violations == []
    fake.kernel(stream)
    (told,) = fake.forgive()
    assert "is full, and the host waits for work that hangs" in told


def made_event(fake: FakeCuda, stream: int) -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    fake.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))
    fake.call("cuEventRecord", event, ctypes.c_void_p(stream))
    return event


UNSAFE = ("cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuMemcpyAsync")
OF_TORCH = (b"cuMemAlloc", b"cuModuleLoadData")


def unsafe_calls(fake: FakeCuda, copy: Copy, event: ctypes.c_void_p) -> dict[str, int]:
    """The errors of calls, by their names."""
    return {
        "cuEventQuery": fake.result("cuEventQuery", event),
        "cuEventSynchronize": fake.result("cuEventSynchronize", event),
        "cuStreamSynchronize": fake.result("cuStreamSynchronize", ctypes.c_void_p(copy.stream)),
        "cuMemcpyAsync": copy.run(to_host=True),
    }


@pytest.mark.parametrize("relaxed", [True, False])
def test_unsafe_calls_break_the_capture_of_another_thread(fake: FakeCuda, relaxed: bool) -> None:
    copy = Copy(fake, pinned=False)
    event = made_event(fake, copy.stream)
    fake.run_all()
    fake.set_capturing(True)
    mode = ctypes.c_int(RELAXED if relaxed else 0)
    fake.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    errors = unsafe_calls(fake, copy, event)
    of_torch = [bool(fake.library.fake_unsafe(name)) for name in OF_TORCH]
    fake.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    told = fake.forgive()
    assert errors == dict.fromkeys(UNSAFE, 0 if relaxed else CAPTURE)
    assert of_torch == [relaxed] * len(OF_TORCH)
    names = [] if relaxed else [*UNSAFE, *map(bytes.decode, OF_TORCH)]
    assert told == [f"{name}: a capture of another thread is broken" for name in names]
    fake.set_capturing(False)
    assert set(unsafe_calls(fake, copy, event).values()) == {0}
    fake.call("cuEventDestroy", event)


def test_unsafe_calls_break_a_capture_of_the_same_thread(fake: FakeCuda) -> None:
    copy = Copy(fake, pinned=False)
    event = made_event(fake, copy.stream)
    fake.run_all()
    found: list[dict[str, int]] = []

    def others() -> None:
        fake.retain(0)
        found.append(unsafe_calls(fake, copy, event))

    fake.set_capturing_alone(True)
    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert found == [dict.fromkeys(UNSAFE, 0)]
    assert unsafe_calls(fake, copy, event) == dict.fromkeys(UNSAFE, CAPTURE)
    assert fake.forgive() == [f"{name}: its own capture is broken" for name in UNSAFE]
    fake.set_capturing_alone(False)
    assert unsafe_calls(fake, copy, event) == dict.fromkeys(UNSAFE, 0)
    fake.call("cuEventDestroy", event)


def test_a_relaxed_thread_may_not_wait_for_a_context_either(fake: FakeCuda) -> None:
    fake.retain(0)
    fake.set_capturing(True)
    found: list[int] = []

    def wait() -> None:
        fake.retain(0)
        fake.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))
        found.append(fake.result("cuCtxSynchronize"))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [CAPTURE]
    assert fake.forgive() == ["cuCtxSynchronize: a capture of another thread is broken"]
    fake.set_capturing(False)
    assert fake.result("cuCtxSynchronize") == 0


def test_launches_need_the_device_of_their_stream_and_copies_do_not(fake: FakeCuda) -> None:
    copy = Copy(fake, pinned=True)
    accesses = accesses_of([], [PLACE])
    fake.retain(0)
    fake.library.fake_launch(copy.stream, 1000, accesses[0], 1)
    assert fake.violations == []
    fake.retain(1)
    assert copy.run(to_host=True) == 0
    assert fake.violations == []
    fake.library.fake_launch(copy.stream, 1000, accesses[0], 1)
    told = "a launch on a stream of device 0, while device 1 is current"
    assert fake.forgive() == [f"fake_launch: {told}"]
    fake.call("cuStreamSynchronize", ctypes.c_void_p(copy.stream))

"""Memory of the host beside torch's own engine. Run by test_device_oracle.py."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pykern
from pykern.runtime.gpu import streams
from pykern.runtime.gpu.capture.refusals import CannotCapture
from tests.device_oracle.captures_on_gpus import assert_alike
from tests.device_oracle.oracle import gpus
from tests.device_oracle.steps_on_gpus import TWO, WIDTH, mlp
from tests.fake_cuda.fake import FakeCuda
from tests.support.plain_step import plain_step

CAPTURES = [False, True, "step"]


def test_pinned_memory_is_known_by_its_address(four_gpus: FakeCuda) -> None:
    x = torch.randn(4, 6)
    pinned = x.pin_memory()
    assert torch.equal(pinned, x)
    made = torch.empty(4, pin_memory=True)
    assert all(tensor.is_pinned() for tensor in (pinned, pinned[1:, 2:], pinned.T, made))
    assert not any(tensor.is_pinned() for tensor in (x, pinned.clone(), pinned + 1))


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_to_the_host_has_come_unless_it_is_asked_not_to_wait(
    four_gpus: FakeCuda, pinned: bool, non_blocking: bool
) -> None:
    four_gpus.set_eagerness(0)
    source, into = torch.arange(4.0, device="cuda:0"), torch.zeros(4, pin_memory=pinned)
    into.copy_(source, non_blocking=non_blocking)
    assert (into == 0).all() == (pinned and non_blocking)
    torch.cuda.synchronize()
    assert into.tolist() == [0, 1, 2, 3]
    assert (four_gpus.library.fake_pageable_copies() > 0) == (not pinned)


@pytest.mark.parametrize("ends", [("cpu", "cuda:1"), ("cuda:1", "cpu")])
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_convert_and_reorder(four_gpus: FakeCuda, pinned: bool, ends: Any) -> None:
    values = torch.arange(12.0).view(3, 4)
    source = (values.pin_memory() if pinned else values).to(ends[0])
    double = torch.zeros(3, 4, dtype=torch.float64, device=ends[1])
    turned = torch.zeros(4, 3, device=ends[1]).T
    part = torch.zeros(3, 9, device=ends[1])[:, 1:5]
    for into in (double, turned, part):
        into.copy_(source, non_blocking=True)
        assert torch.equal(into.cpu(), values.to(into.dtype))
    assert torch.equal(turned.copy_(source[1]).cpu(), values[1].expand(3, 4))


def step(*, waits: bool) -> None:
    with gpus(1):
        x = torch.zeros(4).pin_memory()
        x.to("cuda:0", non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        x.fill_(1)


def test_a_change_of_bytes_that_a_copy_reads_is_seen() -> None:
    step(waits=True)
    with pytest.raises(AssertionError, match="the host has changed bytes that cuMemcpyAsync"):
        step(waits=False)


def test_a_copy_may_overwrite_what_the_copy_before_it_has_read(four_gpus: FakeCuda) -> None:
    x = torch.zeros(4).pin_memory()
    there = x.to("cuda:0", non_blocking=True)
    x.copy_(there + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert x.tolist() == [1] * 4


def train(capture: Any) -> None:
    """Steps of a pinned batch and target, which are refilled when a step has returned."""
    layers = mlp()
    plain = copy.deepcopy(layers)
    x, y = (torch.empty(16, WIDTH, pin_memory=True) for _ in range(2))
    with pykern.Pipeline(
        layers, devices=TWO, microbatches=4, loss_fn=mse_loss, capture=capture
    ) as pipe:
        for _ in range(4):
            x.normal_()
            y.normal_()
            expected = plain_step(plain, x, y, mse_loss, 4, pipe.partition.stages)
            loss = pipe.step(x, target=y)
            x.fill_(7)
            y.fill_(7)
            assert torch.equal(loss.cpu(), expected)
            assert_alike(pipe, plain)


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_pinned_batch_may_be_refilled(four_gpus: FakeCuda, capture: Any) -> None:
    train(capture)


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_step_that_does_not_wait_for_copies_of_its_batch_is_seen(
    monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    monkeypatch.setattr(streams, "is_pinned", lambda _: False)
    with pytest.raises(AssertionError, match="the host has changed bytes"), gpus(2):
        train(capture)


def test_a_stream_of_one_pinned_batch_that_is_refilled(four_gpus: FakeCuda) -> None:
    layers = mlp()
    plain = copy.deepcopy(layers)
    four_gpus.set_eagerness(0)
    batch = torch.empty(16, WIDTH, pin_memory=True)
    given: list[Tensor] = []

    def batches() -> Iterator[Tensor]:
        for _ in range(4):
            given.append(batch.normal_().clone())
            yield batch

    with pykern.Pipeline(layers, devices=TWO, microbatches=4) as pipe, torch.no_grad():
        for number, output in enumerate(pipe.stream(batches())):
            expected = torch.cat([plain(part) for part in given[number].split(4)])
            assert torch.equal(output.cpu(), expected)


class Calls(nn.Module):
    """Calls a function while it is captured."""

    call: Callable[[], object]

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.call()
        return x + 1


def in_a_thread(call: Callable[[], object]) -> None:
    """Calls, and passes its error on."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def allocate() -> None:
    # Nothing of this size was freed.
    torch.empty(77_777, device="cuda:0")


def copy_pageable() -> None:
    torch.zeros(1, device="cuda:0").cpu()


def pin() -> None:
    torch.empty(8, pin_memory=True)


def query() -> None:
    torch.cuda.current_stream(0).record_event().query()


def wait() -> None:
    torch.cuda.current_stream(0).synchronize()


UNSAFE = [allocate, copy_pageable, pin, query, wait]


def steps(call: Callable[[], object]) -> None:
    """A step that is called, and one that is captured, in which a layer makes a call."""
    layer = Calls()
    layer.call = call
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(16, WIDTH)
    # A block of one element, for calls that are not about memory.
    torch.zeros(1, device="cuda:0")
    with pykern.Pipeline(
        layers, devices=TWO, microbatches=2, loss_fn=mse_loss, capture=True
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)


def told(fake: FakeCuda, call: Callable[[], object]) -> str:
    """The one objection of the driver to a call in a capture."""
    with pytest.raises(CannotCapture):
        steps(call)
    (only,) = set(fake.forgive())
    return only


@pytest.mark.parametrize("call", UNSAFE)
def test_other_threads_may_call_what_they_like_beside_captures(
    four_gpus: FakeCuda, call: Callable[[], object]
) -> None:
    steps(lambda: in_a_thread(call))
    assert four_gpus.calls("cuGraphLaunch") > 0


@pytest.mark.parametrize("call", UNSAFE)
def test_a_capture_that_forbids_unsafe_calls_to_other_threads_is_seen(
    four_gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    begin = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "capture_begin", lambda graph, pool, **_: begin(graph, pool)
    )
    found = told(four_gpus, lambda: in_a_thread(call))
    assert "a capture of another thread is broken" in found


def on_another_stream(call: Callable[[], object]) -> None:
    with torch.cuda.stream(torch.cuda.Stream(0)):
        call()


@pytest.mark.parametrize("call", UNSAFE)
def test_unsafe_calls_of_the_thread_that_captures_are_seen(
    four_gpus: FakeCuda, call: Callable[[], object]
) -> None:
    found = told(four_gpus, lambda: on_another_stream(call))
    assert "its own capture is broken" in found


def test_pinned_memory_may_be_allocated_on_the_stream_that_is_captured(four_gpus: FakeCuda) -> None:
    steps(pin)
    assert four_gpus.calls("cuGraphLaunch") > 0

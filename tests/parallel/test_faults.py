"""Faults of one process, and how the others get to know."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from tests import peers
from tests.diagonal import diagonal
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of, layers

TIMEOUT_S = 4.0


def outcomes(num_peers: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    return peers.outcomes(num_peers, function, *arguments, group_timeout_s=TIMEOUT_S)


class Trigger(nn.Module):
    """Calls something in one of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Callable[[], None]] = {}
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        call = self.calls.get(self.count)
        self.count += 1
        if call is not None:
            call()
        return x


def triggered(
    dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[pykern.Pipeline, Trigger]:
    trigger = Trigger()
    first, *others = layers()
    model = nn.Sequential(first, *others[:2], trigger, others[2]).to(dtype)
    settings = {
        "devices": "cpu:2",
        "microbatches": 4,
        "loss_fn": nn.functional.mse_loss,
        "process_group": dist.group.WORLD,
    }
    return pykern.Pipeline(model, **{**settings, **options}), trigger


def step(pipe: pykern.Pipeline, number: int, rank: int) -> Tensor:
    x, y = batch_of(number, rank, 8)
    return pipe.step(x, target=y)


def fail(message: str) -> None:
    raise ArithmeticError(message)


def one_fails(rank: int, failing: int, microbatch: int) -> Any:
    """Steps 0 to 3, of which one process fails in step 1; all others get to know, and go on."""
    pipe, trigger = triggered()
    with pipe:
        if rank == failing:
            trigger.calls[4 + microbatch] = lambda: fail("no more")
        gradients, errors = [], []
        for number in range(4):
            try:
                step(pipe, number, rank)
            except Exception as error:
                errors.append((number, type(error).__name__, str(error)))
            gradients.append([p.grad.clone() for p in pipe.parameters() if p.grad is not None])
            pipe.zero_grad()
        return errors, gradients


@pytest.mark.parametrize(("failing", "microbatch"), diagonal([0, 1], [0, 3]))
def test_a_step_that_fails_in_one_process_fails_in_all_and_the_next_succeeds(
    failing: int, microbatch: int
) -> None:
    found = outcomes(2, one_fails, failing, microbatch)
    fresh = outcomes(2, one_fails, -1, 0)
    for rank, (errors, gradients) in enumerate(found):
        ((number, kind, message),) = errors
        assert number == 1
        assert kind == ("ArithmeticError" if rank == failing else "PeerError")
        assert "no more" in message
        if rank != failing:
            assert f"process {failing} of the group has failed in this step" in message
        for later in (0, 2, 3):
            assert all(map(torch.equal, gradients[later], fresh[rank][1][later]))


def one_fails_in(rank: int, dtype: torch.dtype, default: torch.dtype) -> list[str]:
    """Process 1 fails in step 0; the failures of two steps of a model of a dtype."""
    torch.set_default_dtype(default)
    errors = []
    pipe, trigger = triggered(dtype=dtype)
    with pipe:
        if rank == 1:
            trigger.calls[2] = lambda: fail("no more")
        for number in range(2):
            x, y = (tensor.to(dtype) for tensor in batch_of(number, rank, 8))
            try:
                assert pipe.step(x, target=y).dtype == dtype
                errors.append("")
            except Exception as error:
                errors.append(str(error))
            pipe.zero_grad()
    return errors


@pytest.mark.parametrize(
    ("dtype", "default"),
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_a_failure_is_told_whatever_the_dtype(dtype: torch.dtype, default: torch.dtype) -> None:
    """The peers wait for sums of as many bytes as they have sent."""
    for first, second in peers.run(2, one_fails_in, dtype, default):
        assert "no more" in first
        assert not second


@dataclass(frozen=True)
class Mute(Exception):
    """It takes no notes and cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no words")


def raise_mute() -> None:
    raise Mute


def one_is_mute(rank: int) -> Any:
    pipe, trigger = triggered()
    with pipe:
        if rank == 1:
            trigger.calls[2] = raise_mute
        with pytest.raises(Mute if rank == 1 else pykern.PeerError) as caught:
            step(pipe, 0, rank)
        pipe.zero_grad()
        return "" if rank == 1 else str(caught.value), step(pipe, 1, rank)


def test_an_exception_that_cannot_be_shown_is_told_by_its_name() -> None:
    (message, loss), (_, other) = outcomes(2, one_is_mute)
    assert "process 1 of the group has failed in this step: Mute; its gradients are" in message
    assert torch.equal(loss, other)


def bad_input(rank: int) -> Any:
    with pipeline() as pipe:
        x, y = batch_of(0, rank, 8)
        with pytest.raises(RuntimeError if rank == 0 else ValueError) as caught:
            pipe.step(x, target=y[: 3 if rank else 8])
        return f"{caught.type.__name__}: {caught.value}", step(pipe, 1, rank)


def test_a_batch_that_one_process_refuses_is_told_to_all() -> None:
    (first, loss), (second, other) = outcomes(2, bad_input)
    assert second.startswith("SplitError: ")
    assert first.startswith("PeerError: process 1 of the group has failed before its step: Split")
    assert torch.equal(loss, other)


def die(rank: int, dying: int) -> Any:
    pipe, trigger = triggered()
    if rank == dying:
        trigger.calls[6] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    step(pipe, 0, rank)
    start = time.monotonic()
    with pytest.raises(pykern.PeerError, match="is gone, or has not come within 4 s") as caught:
        step(pipe, 1, rank)
    took = time.monotonic() - start
    with pytest.raises(pykern.PeerError, match=r"has lost its peers: .*Make the process group"):
        step(pipe, 2, rank)
    pipe.close()
    return took, str(caught.value)


@pytest.mark.parametrize(("num_peers", "dying"), diagonal([2, 4], [0, 1]))
def test_a_process_that_is_killed_in_a_step_is_noticed_by_all_in_time(
    num_peers: int, dying: int
) -> None:
    found = outcomes(num_peers, die, dying)
    for rank, outcome in enumerate(found):
        if rank == dying:
            assert isinstance(outcome, peers.Died)
            assert outcome.code == -signal.SIGKILL
        else:
            took, _ = outcome
            assert took < TIMEOUT_S + 3


def hang(rank: int) -> Any:
    pipe, trigger = triggered()
    if rank == 1:
        trigger.calls[0] = lambda: time.sleep(TIMEOUT_S + 1)
    start = time.monotonic()
    with pytest.raises(pykern.PeerError, match="has not come within 4 s"):
        step(pipe, 0, rank)
    return time.monotonic() - start


def test_a_process_that_hangs_is_given_up() -> None:
    took, _ = outcomes(2, hang)
    assert TIMEOUT_S - 1 < took < TIMEOUT_S + 3


def interrupted_once(rank: int) -> Any:
    """Process 0 is interrupted while it waits for process 1, which takes its time."""
    pipe, trigger = triggered()
    with pipe:
        if rank == 1:
            trigger.calls[0] = lambda: time.sleep(1.5)
            with pytest.raises(pykern.PeerError, match=r"process 0 .* KeyboardInterrupt"):
                step(pipe, 0, rank)
        else:
            timer = threading.Timer(0.8, signal.raise_signal, (signal.SIGINT,))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                step(pipe, 0, rank)
        pipe.zero_grad()
        return step(pipe, 1, rank)


def test_an_interrupt_in_one_process_is_told_and_all_go_on() -> None:
    first, second = peers.run(2, interrupted_once)
    assert torch.equal(first, second)


def interrupted(rank: int) -> float:
    """Process 0 waits for one that hangs, and is interrupted twice. When each went on."""
    pipe, trigger = triggered()
    woken = [0.0]

    def hang() -> None:
        time.sleep(TIMEOUT_S + 1)
        woken[0] = time.monotonic()

    if rank == 1:
        trigger.calls[0] = hang
        with pytest.raises(pykern.PeerError):
            step(pipe, 0, rank)
        return woken[0]
    timer = threading.Timer(1, signal.raise_signal, (signal.SIGINT,))
    twice = threading.Timer(1.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    twice.start()
    with pytest.raises(KeyboardInterrupt):
        step(pipe, 0, rank)
    return time.monotonic()


def test_who_waits_for_a_process_that_hangs_can_be_interrupted() -> None:
    # One clock for all processes of a machine.
    interrupted_at, woken_at = outcomes(2, interrupted)
    assert interrupted_at < woken_at


def differing(rank: int, what: str) -> None:
    options: dict[str, Any] = {}
    if rank == 1 and what == "schedule":
        options["schedule"] = "gpipe"
    if rank == 1 and what == "reduction":
        options["reduction"] = "sum"
    if rank == 1 and what == "stages":
        options["balance"] = [1, 3]
    loss_fn = nn.functional.l1_loss if rank == 1 and what == "loss" else nn.functional.mse_loss
    model = nn.Sequential(*layers(width=8 if rank == 1 and what == "parameters" else 6))
    pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=loss_fn,
        process_group=dist.group.WORLD,
        **options,
    )


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("loss", "the loss function"),
        ("schedule", "the plan"),
        ("reduction", "reduction"),
        ("stages", "the stages"),
        ("parameters", "the parameters"),
    ],
)
def test_pipelines_that_differ_are_refused_everywhere_before_the_first_step(
    what: str, named: str
) -> None:
    for error in outcomes(2, differing, what):
        assert isinstance(error, pykern.PeerError)
        assert f"in all processes of the group, got ones that differ in {named}" in str(error)


def other_values(rank: int) -> Any:
    with pipeline() as pipe:
        if rank == 1:
            with torch.no_grad():
                next(pipe.parameters()).view(-1)[3] += 1e-6
        with pytest.raises(pykern.PeerError, match="has other parameters or buffers") as caught:
            step(pipe, 0, rank)
        if rank == 1:
            with torch.no_grad():
                next(pipe.parameters()).copy_(next(iter(layers()[0].parameters())))
        return str(caught.value), step(pipe, 0, rank)


def test_other_values_of_parameters_are_noticed_in_the_first_step() -> None:
    (first, loss), (second, other) = outcomes(2, other_values)
    assert first.startswith("process 1 ")
    assert second.startswith("process 0 ")
    assert torch.equal(loss, other)


def other_kind_of_step(rank: int, what: str) -> Any:
    with pipeline() as pipe:
        step(pipe, 0, rank)
        if rank == 1 and what == "frozen":
            next(pipe.parameters()).requires_grad_(False)
        match = "in no_sync|out of no_sync" if what == "no_sync" else "or trains others"
        around = pipe.no_sync() if rank == 1 and what == "no_sync" else nullcontext()
        with around, pytest.raises(pykern.PeerError, match=match):
            step(pipe, 1, rank)
        next(pipe.parameters()).requires_grad_(True)
        return step(pipe, 2, rank)


@pytest.mark.parametrize("what", ["no_sync", "frozen"])
def test_steps_that_do_not_fit_together_are_refused(what: str) -> None:
    first, second = outcomes(2, other_kind_of_step, what)
    assert torch.equal(first, second)


def never_comes(rank: int) -> None:
    if rank == 0:
        pipeline()
    time.sleep(TIMEOUT_S + 2)


def test_a_process_that_makes_no_pipeline_is_not_waited_for_for_ever() -> None:
    error, _ = outcomes(2, never_comes)
    assert isinstance(error, pykern.PeerError)
    assert "a process of the group has not made its pipeline within 4 s, or is gone:" in str(error)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"process_group must be a process group or a mesh of one dimension, as mesh\['dp'\] "
        r"is, got a",
    ):
        pipeline(process_group="world")


def captured(rank: int) -> None:
    with pytest.raises(ValueError, match="capture must be False with process_group, got 'auto'"):
        pipeline(capture="auto")


def test_captured_steps_are_refused() -> None:
    peers.run(1, captured)

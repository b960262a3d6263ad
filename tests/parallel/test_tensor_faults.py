"""A failure of one shard ends in an error in all processes, at once where it can."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.parallel.peers.errors import PeerError, SlicesLost
from tests import peers
from tests.diagonal import nightly
from tests.parallel.sharded import (
    Block,
    batch_of,
    layers,
    mesh_of,
    pipeline,
    train,
    whole_parameters,
)
from tests.parallel.test_faults import raise_mute
from tests.support.comparison import assert_same_tensors

GROUP_TIMEOUT_S = 4.0
# Long before the group's timeout.
AT_ONCE_S = 3.0

pytestmark = pytest.mark.slow


class Sleepy(Block):
    """A block that takes its time, another in each process."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(random.random() * 0.004)
        x = super().forward(x)
        time.sleep(random.random() * 0.002)
        return x


def steps(rank: int, schedule: str, num_steps: int, sleepy: bool) -> dict[str, Tensor]:
    random.seed(rank)
    model = layers()
    for layer in model:
        if sleepy and isinstance(layer, Block):
            layer.__class__ = Sleepy
    with pipeline(mesh_of(2), model, schedule=schedule) as pipe:

        def step(number: int) -> Tensor:
            x, y = batch_of(number)
            return pipe.step(x, target=y)

        train(step, torch.optim.SGD(pipe.parameters(), lr=0.01), num_steps)
        return whole_parameters(pipe)


@pytest.mark.parametrize(
    ("schedule", "num_steps"),
    [("one_f_one_b", 8), nightly("one_f_one_b", 50), nightly("zb_h1", 50)],
)
def test_whoever_is_late_no_device_waits_for_another(schedule: str, num_steps: int) -> None:
    """With one group for all devices, or meshes that torch takes for one, this ends in an abort."""
    wanted = peers.run(2, steps, schedule, num_steps, False)[0]
    for found in peers.run(2, steps, schedule, num_steps, True):
        assert_same_tensors(found, wanted)


class Faulty(Block):
    """A block that does something once it is armed."""

    fault: Callable[[], None] | None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault()
        return super().forward(x)


def armed(rank: int, where: int, fault: Callable[[], None]) -> pykern.Pipeline:
    """A pipeline that has made a step, and whose block 4 has a fault in one process from now on."""
    model = layers()
    model[4].__class__ = Faulty
    model[4].fault = None  # type: ignore[assignment]
    pipe = pipeline(mesh_of(2), model)
    x, y = batch_of(0)
    pipe.step(x, target=y)
    if rank == where:
        model[4].fault = fault  # type: ignore[assignment]
    return pipe


def raised_by(call: Callable[[], Any]) -> tuple[BaseException | None, float]:
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:
        return error, time.monotonic() - begun
    return None, time.monotonic() - begun


def raise_key() -> None:
    raise KeyError("here")


def one_raises(rank: int) -> list[tuple[BaseException | None, float]]:
    pipe = armed(rank, 1, raise_key)
    x, y = batch_of(1)
    return [
        raised_by(lambda: pipe.step(x, target=y)),
        raised_by(lambda: pipe.step(x, target=y)),
        raised_by(lambda: pipe(x)),
        raised_by(lambda: next(pipe.stream([x]))),
    ]


def test_an_exception_ends_the_step_of_all_at_once() -> None:
    first, second = peers.run(2, one_raises)
    (lost, took), *later_first = first
    (mine, mine_took), *later_second = second
    assert isinstance(lost, SlicesLost)
    assert "has failed, is gone, or has not come within 20 s" in str(lost)
    assert isinstance(mine, KeyError)
    assert any("stage 1, microbatch 0" in note for note in mine.__notes__)
    assert max(took, mine_took) < AT_ONCE_S
    for error, _ in [*later_first, *later_second]:
        assert isinstance(error, SlicesLost)
        assert "make the pipeline again, of a plain model, in every process" in str(error)


def one_is_mute(rank: int) -> tuple[str, str]:
    pipe = armed(rank, 1, raise_mute)
    x, y = batch_of(1)
    error, took = raised_by(lambda: pipe.step(x, target=y))
    assert took < AT_ONCE_S
    again, _ = raised_by(lambda: pipe.step(x, target=y))
    return type(error).__name__, str(again)


def test_an_exception_that_cannot_be_shown_ends_the_step_of_all_as_well() -> None:
    first, second = peers.run(2, one_is_mute)
    assert first[0] == "SlicesLost"
    assert second[0] == "Mute"
    assert "has lost the processes with its other shards: Mute;" in second[1]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def one_dies(rank: int) -> tuple[BaseException | None, float]:
    pipe = armed(rank, 1, die)
    x, y = batch_of(1)
    return raised_by(lambda: pipe.step(x, target=y))


def test_a_death_ends_the_step_of_the_others_at_once() -> None:
    (error, took), died = peers.outcomes(2, one_dies)
    assert isinstance(died, peers.Died)
    assert isinstance(error, SlicesLost)
    assert took < AT_ONCE_S


def one_hangs(rank: int, given_up: Path) -> tuple[BaseException | None, float]:
    """Process 1 hangs until process 0 has given it up."""

    def hang() -> None:
        while not given_up.exists():
            time.sleep(0.05)

    pipe = armed(rank, 1, hang)
    x, y = batch_of(1)
    found = raised_by(lambda: pipe.step(x, target=y))
    given_up.touch()
    return found


def test_who_hangs_is_waited_for_as_long_as_the_group_says(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"
    (error, took), _ = peers.run(2, one_hangs, given_up, group_timeout_s=GROUP_TIMEOUT_S)
    assert isinstance(error, SlicesLost)
    assert "within 4 s" in str(error)
    assert GROUP_TIMEOUT_S - 1 < took < GROUP_TIMEOUT_S + AT_ONCE_S


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)


def one_is_interrupted(rank: int) -> tuple[str, float]:
    pipe = armed(rank, 1, interrupt)
    x, y = batch_of(1)
    error, took = raised_by(lambda: pipe.step(x, target=y))
    return type(error).__name__, took


def test_an_interrupt_ends_the_step_of_all_at_once() -> None:
    first, second = peers.run(2, one_is_interrupted)
    assert first[0] == "SlicesLost"
    assert second[0] == "KeyboardInterrupt"
    assert max(first[1], second[1]) < AT_ONCE_S


def something_else(rank: int, what: str) -> tuple[str, str, Tensor]:
    """A process does something else than the other; then both do the same."""
    model = layers()
    model.insert(2, nn.Dropout(0.5))
    with pipeline(mesh_of(2), model) as pipe:
        x, y = batch_of(1)
        torch.manual_seed(5)
        if what == "seeds":
            pipe.step(x, target=y)
            torch.manual_seed(rank)
        elif what == "rows":
            x, y = batch_of(1, rows=4 + rank)
        elif what == "batch":
            x, y = batch_of(1 + rank)
        elif what == "error":
            x, y = (x, y) if rank == 0 else (x, y[:3])
        error, _ = raised_by(lambda: pipe.step(x, target=y))
        torch.manual_seed(5)
        x, y = batch_of(2)
        pipe.zero_grad()
        return type(error).__name__, str(error), pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seeds", "process 1 .* has other random numbers than process 0, and a layer draws some"),
        (
            "rows",
            "process 1 .* has a batch of 5 rows, and process 0 one of 4. Give all of the group",
        ),
        ("batch", "process 1 .* has another batch than process 0. Give all of the group the same"),
    ],
)
def test_processes_that_do_something_else_are_told(what: str, message: str) -> None:
    first, second = peers.run(2, something_else, what)
    for kind, text, _ in (first, second):
        assert kind == "PeerError"
        assert re.search(message, text)
    assert torch.equal(first[2], second[2])


def test_what_is_raised_before_a_step_is_told_and_costs_nothing() -> None:
    first, second = peers.run(2, something_else, "error")
    assert first[0] == "PeerError"
    assert "process 1 of the tensor-parallel group has failed before its step: Split" in first[1]
    assert second[0] == "SplitError"
    assert torch.equal(first[2], second[2])


def other_models(rank: int) -> str:
    model = layers()
    if rank == 1:
        with torch.no_grad():
            model[3].norm.weight[0] += 1  # type: ignore[union-attr,index,operator]
    error, _ = raised_by(lambda: pipeline(mesh_of(2), model))
    assert isinstance(error, PeerError)
    return str(error)


def test_other_parameters_are_refused_in_all_processes() -> None:
    for message in peers.run(2, other_models):
        assert (
            "pipelines must be alike in all processes of the group, got ones that differ in the "
            "parameters' values"
        ) in message


def never_comes(rank: int) -> None:
    mesh = mesh_of(2)
    if rank == 0:
        pipeline(mesh)
    time.sleep(GROUP_TIMEOUT_S + 2)


def test_who_makes_no_pipeline_is_not_waited_for_for_ever() -> None:
    error, _ = peers.outcomes(2, never_comes, group_timeout_s=GROUP_TIMEOUT_S)
    assert isinstance(error, PeerError)
    assert "a process of the group has not made its pipeline within 4 s, or is gone:" in str(error)


def nan_in_one_shard(rank: int) -> str:
    model = layers()
    with torch.no_grad():
        model[6].up.bias[-1] = float("nan")  # type: ignore[union-attr,operator]
    with pipeline(mesh_of(2), model, check_finite="activations") as pipe:
        x, y = batch_of(0)
        error, took = raised_by(lambda: pipe.step(x, target=y))
        assert took < AT_ONCE_S
        return f"{type(error).__name__}: {error}"


def test_what_is_not_finite_is_named() -> None:
    for message in peers.run(2, nan_in_one_shard):
        assert message.startswith("FloatingPointError: the output of layer '6' has")

"""The CUDA path on the fake driver: same bits as the plain model, and no rule of CUDA is broken."""

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pykern import schedules
from pykern.plan import Action, Placement, Plan
from pykern.runtime.gpu.rings import RingBuffers
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.runtime.models import CASES
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step


@pytest.mark.parametrize("model", CASES)
def test_every_bit_equals_the_plain_model(gpus: FakeCuda, model: str) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    plan = schedules.one_f_one_b(3, 4)
    with case.pipeline(plan, "cuda") as pipe:
        for rows in (11, 3):
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(plain, x, y, case.loss_fn, 4, pipe.partition.stages)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize(
    "plan",
    [
        schedules.gpipe(2, 4),
        schedules.interleaved(2, 4, 2),
        schedules.hanayo(2, 4, 1),
        schedules.zb_h1(2, 4),
    ],
    ids=["gpipe", "interleaved", "hanayo", "zb_h1"],
)
def test_slots_are_used_again_in_order_whatever_the_schedule(gpus: FakeCuda, plan: Plan) -> None:
    case = CASES["mlp"](11)
    plain = copy.deepcopy(case.layers)
    with case.pipeline(plan, "cuda") as pipe:
        for _ in range(2):
            expected = plain_step(
                plain, case.inputs, case.target, case.loss_fn, 4, pipe.partition.stages
            )
            assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)


def test_rings_that_grow_give_their_memory_back_when_it_is_read(gpus: FakeCuda) -> None:
    gpus.set_peer(0, 1, False)
    case = CASES["mlp"](64)
    with pytest.warns(UserWarning, match="do not reach each other's memory") as given:
        pipe = case.pipeline(schedules.one_f_one_b(2, 4), "cuda")
    assert "/tests/" in given[0].filename
    with pipe:
        for rows in (4, 16, 64):
            x, y = case.inputs[:rows], case.target[:rows]
            assert pipe.step(x, target=y) > 0


def test_a_ring_lets_go_of_memory_that_it_has_outgrown() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def on_lane(_lane: int, num_bytes: int) -> torch.Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        made.append(weakref.ref(buffer))
        return buffer

    memory: Any = SimpleNamespace(on_lane=on_lane, synchronize=lambda: None)
    ring = RingBuffers(memory, 0)
    landed = ring.place((0,), torch.ones(1))
    ring.place((0,), torch.ones(2))
    # A copy may still read it, and torch may give it to others afterwards.
    assert ring.owns(landed)
    ring.end()
    assert not ring.owns(landed)
    assert [buffer() is None for buffer in made] == [True, False]


def test_a_pipeline_may_go_while_its_last_step_runs(gpus: FakeCuda) -> None:
    case = CASES["mlp"](8)
    pipe = case.pipeline(schedules.one_f_one_b(2, 4), "cuda")
    pipe.step(case.inputs, target=case.target)
    synchronized = gpus.calls("cuCtxSynchronize")
    del pipe
    gc.collect()
    assert gpus.calls("cuCtxSynchronize") > synchronized


def test_steps_may_come_from_streams_that_nothing_orders(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["mlp"](8)
    plain = copy.deepcopy(case.layers)
    # Callers work in between in an order of their own.
    monkeypatch.setattr(HostGpus, "callers", lambda _: {gpu: gpus.stream(gpu) for gpu in range(3)})
    monkeypatch.setattr(HostGpus, "step", lambda self: _step_of_its_own(gpus))
    with case.pipeline(schedules.one_f_one_b(3, 4), "cuda") as pipe, torch.no_grad():
        # Held, because their memory is the lanes'.
        outputs = [pipe(case.inputs) for _ in range(3)]
        gpus.synchronize()
        for output in outputs:
            assert torch.equal(output, torch.cat([plain(x) for x in case.inputs.split(2)]))


@contextmanager
def _step_of_its_own(gpus: FakeCuda) -> Iterator[None]:
    gpus.begin_step()
    yield


class Shift(nn.Module):
    """Hands the gradient that comes in to its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_a_hook_may_keep_a_gradient_that_came_from_another_gpu(gpus: FakeCuda) -> None:
    """The ring where it has landed gets those of later microbatches."""
    first = Shift()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    first.shift.register_hook(lambda given: kept.append((given, given.clone())))
    x, y = torch.randn(2, 8, 4)
    with planned([first, Shift()], schedules.one_f_one_b(2, 4), devices="cuda") as pipe:
        pipe.step(x, target=y)
    assert len(kept) == 4
    assert all(torch.equal(now, then) for now, then in kept)


def test_an_output_may_be_what_the_last_stage_was_given(gpus: FakeCuda) -> None:
    """The ring where it has landed gets those of later microbatches, and of later calls."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    plain = copy.deepcopy(layers)
    x = torch.randn(8, 4)
    with (
        planned(layers, schedules.one_f_one_b(2, 4), None, devices="cuda") as pipe,
        torch.no_grad(),
    ):
        outputs = [pipe(batch) for batch in (x, x + 1)]
        for output, batch in zip(outputs, (x, x + 1), strict=True):
            assert torch.equal(output, torch.cat([plain(part) for part in batch.split(2)]))


def _each(*names: str) -> list[Action]:
    """Each of these actions of eight microbatches, one after the other."""
    return [Action.parse(f"{name}{number}") for name in names for number in range(8)]


# Stage 1 hands on what it was given: to another GPU, or to a stage beside it that runs far later.
HANDED_ON = {
    "to another GPU": schedules.one_f_one_b(3, 8),
    "beside it": Plan(
        Placement(2, [0, 1, 1]), 8, [_each("0F", "0B"), _each("1F", "2F", "2B", "1B")]
    ),
}


@pytest.mark.parametrize("where", HANDED_ON)
def test_a_stage_may_hand_on_what_it_was_given(gpus: FakeCuda, where: str) -> None:
    """The ring where it has landed gets later microbatches before it is read."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))
    plain = copy.deepcopy(layers)
    x = torch.randn(16, 4)
    with planned(layers, HANDED_ON[where], None, devices="cuda") as pipe, torch.no_grad():
        output = pipe(x)
        assert torch.equal(output, torch.cat([plain(part) for part in x.split(2)]))

"""Recompute on the fake driver, by calls and by graphs, gives what it gives on CPU workers."""

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from pykern import schedules
from pykern.plan import Action, Costs, Kind, Plan, with_recompute
from pykern.runtime.gpu.capture.pools import takes_turns
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.runtime.models import CASES, Case
from tests.runtime.plans import recomputed
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# In four microbatches each begins at a multiple of 16 bytes, as copies of them do: what a matrix
# product rounds to depends on where its factors lie.
ROWS = 16


def steps(pipe: pykern.Pipeline, plain: nn.Sequential, case: Case, num_steps: int) -> None:
    """Steps of both with other data each time, equal to the bit; gradients add up."""
    for number in range(num_steps):
        x, y = case.inputs.roll(number, 0), case.target.roll(number, 0)
        expected = plain_step(
            plain,
            x,
            y,
            case.loss_fn,
            pipe.plan.num_microbatches,
            pipe.partition.stages,
            num_replicas=pipe.plan.placement.num_replicas,
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)


def some(plan: Plan) -> Plan:
    """With an R of every odd microbatch, where devices wait."""
    cells = [
        Action(Kind.R, stage, microbatch)
        for stage in range(plan.num_stages)
        for microbatch in range(1, plan.num_microbatches, 2)
    ]
    return with_recompute(plan, cells, Costs(1.0, 2.0))


CALLED: dict[str, tuple[Callable[[], Plan], str, Any]] = {
    "one_f_one_b": (lambda: recomputed(schedules.one_f_one_b(4, 5)), "structured", "layer"),
    "interleaved": (lambda: some(schedules.interleaved(2, 4)), "cnn", "stage"),
    "zb_v": (lambda: recomputed(schedules.zb_v(4, 5), late=False), "gpt", "layer"),
    "chimera": (lambda: recomputed(schedules.chimera(4, 4)), "dropout", "stage"),
    "hanayo": (lambda: some(schedules.hanayo(2, 4, waves=1)), "frozen", "layer"),
}


@pytest.mark.parametrize("name", CALLED)
def test_called(gpus: FakeCuda, name: str) -> None:
    make, model, level = CALLED[name]
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with case.pipeline(make(), "cuda", recompute=level) as pipe:
        steps(pipe, plain, case, 2)


CAPTURED: dict[str, tuple[Callable[[], Plan], str, Any]] = {
    "one_f_one_b": (lambda: recomputed(schedules.one_f_one_b(2, 4)), "structured", "layer"),
    "some": (lambda: some(schedules.one_f_one_b(2, 4)), "gpt", "stage"),
    "some in turns": (lambda: some(schedules.gpipe(2, 4)), "mlp", "layer"),
    "running statistics": (lambda: recomputed(schedules.hanayo(2, 4, waves=1)), "cnn", "layer"),
    "split": (lambda: recomputed(schedules.zb_h1(2, 4)), "recurrent", "layer"),
    "early": (lambda: recomputed(schedules.one_f_one_b(2, 4), late=False), "frozen", "stage"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured(gpus: FakeCuda, name: str) -> None:
    make, model, level = CAPTURED[name]
    case = CASES[model](ROWS)
    plain = copy.deepcopy(case.layers)
    with case.pipeline(make(), "cuda", recompute=level, capture=True) as pipe:
        steps(pipe, plain, case, 3)
        # A stage without gradients has nothing to launch for R and B.
        if model != "frozen":
            assert gpus.calls("cuGraphLaunch") == 2 * pipe.plan.num_actions


def test_a_whole_step_with_levels_of_all_kinds_is_one_launch(gpus: FakeCuda) -> None:
    case = CASES["mlp"](ROWS)
    plain = copy.deepcopy(case.layers)
    levels: Any = [["none", "layer", "ops", "stage"], "stage"]
    with case.pipeline(schedules.gpipe(2, 4), "cuda", recompute=levels, capture="step") as pipe:
        steps(pipe, plain, case, 3)
        assert gpus.calls("cuGraphLaunch") == 2


def test_what_is_recomputed_lasts_to_the_end_of_its_backward() -> None:
    """If backwards are split, W is that end."""
    plan = recomputed(schedules.zb_h1(2, 4))
    assert [takes_turns(plan, stage) for stage in range(2)] == [True, False]


@pytest.mark.parametrize(("name", "turns"), [("one_f_one_b", True), ("early", False)])
def test_what_is_recomputed_in_turns_is_in_one_memory(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, turns: bool
) -> None:
    pools: list[object] = []
    numbers = count()
    capture = HostGpus.capture

    def noted(self: HostGpus, lane: int, pool: object, run: Any) -> object:
        pools.append((lane, pool))
        return capture(self, lane, None, run)

    monkeypatch.setattr(HostGpus, "pool", lambda _: next(numbers))
    monkeypatch.setattr(HostGpus, "capture", noted)
    plan = CAPTURED[name][0]()
    assert [takes_turns(plan, stage) for stage in range(2)] == [turns, True]
    case = CASES["mlp"](ROWS)
    with case.pipeline(plan, "cuda", recompute="stage", capture=True) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
    # Both stages have two slots: an F for each, then an R and a B for each.
    forward, backward = pools[:4], pools[4:]
    assert len(set(forward)) == 4
    assert len(backward) == 8
    assert len(set(backward)) == (2 if turns else 3)
    assert set(forward).isdisjoint(backward) == turns

"""Pipelines of several devices on one GPU have the loss and the gradients of the plain model."""

import copy
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Plan
from pykern.runtime.recompute.recompute import Level
from tests.diagonal import diagonal
from tests.runtime.models import CASES, Case
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# The request to pykern, with the number of devices that it stands for.
DEVICES: dict[str, tuple[Any, int]] = {
    "the GPU": ("cuda:0", 1),
    "the GPU twice": (["cuda:0"] * 2, 2),
    "the GPU four times": (["cuda:0"] * 4, 4),
    "two parts": ("cuda:0/2", 2),
    "four parts": ("cuda:0/4", 4),
}
FOURS = ["the GPU four times", "four parts"]
NUM_MICROBATCHES = 8


def schedules_that_run() -> list[str]:
    """The schedules of whole microbatches that train, and leave the update to the optimizer."""
    plans = {name: make(4, NUM_MICROBATCHES) for name, make in schedules.by_name.items()}
    return [
        name
        for name, plan in plans.items()
        if (plan.has(Kind.B) or plan.has(Kind.I)) and not plan.has(Kind.U) and plan.num_slices == 1
    ]


def case_on(home: torch.device, model: str, rows: int) -> Case:
    case = CASES[model](rows)
    case.layers.to(home)
    return Case(case.layers, case.inputs.to(home), case.target.to(home), case.loss_fn)


def pipeline(
    case: Case,
    plan: Plan,
    devices: str,
    capture: Literal[True, False, "step"] = False,
    recompute: Level | None = None,
) -> pykern.Pipeline:
    names, _ = DEVICES[devices]
    return case.pipeline(plan, names, capture=capture, recompute=recompute)


def assert_steps_are_plain(
    pipe: pykern.Pipeline, plain: nn.Sequential, case: Case, *batches: int
) -> None:
    """Steps of that many rows each have the bits of the plain model's, gradients adding up."""
    plan = pipe.plan
    for rows in batches:
        x, y = case.inputs[:rows], case.target[:rows]
        expected = plain_step(
            plain,
            x,
            y,
            case.loss_fn,
            plan.num_microbatches,
            pipe.partition.stages,
            num_replicas=plan.placement.num_replicas,
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)


@pytest.mark.parametrize(("devices", "model"), diagonal(DEVICES, ["mlp", "gpt", "dropout"]))
def test_a_step_has_the_bits_of_the_plain_model(
    home: torch.device, devices: str, model: str
) -> None:
    case = case_on(home, model, 11)
    plain = copy.deepcopy(case.layers)
    plan = schedules.one_f_one_b(DEVICES[devices][1], 4)
    with pipeline(case, plan, devices) as pipe:
        assert_steps_are_plain(pipe, plain, case, 11, 3, 11)


@pytest.mark.parametrize("name", schedules_that_run())
@pytest.mark.parametrize("devices", FOURS)
def test_every_schedule_has_them(real_home: torch.device, devices: str, name: str) -> None:
    case = case_on(real_home, "mlp", 16)
    plain = copy.deepcopy(case.layers)
    plan = schedules.by_name[name](4, NUM_MICROBATCHES)
    with pipeline(case, plan, devices) as pipe:
        assert_steps_are_plain(pipe, plain, case, 16, 13)


# On the host, tests/device_oracle/threads_on_gpus.py has them.
@pytest.mark.parametrize("name", schedules_that_run())
@pytest.mark.parametrize("devices", FOURS)
@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_steps_that_threads_issue_have_them(
    real_home: torch.device, model: str, devices: str, name: str
) -> None:
    case = case_on(real_home, model, 16)
    plain = copy.deepcopy(case.layers)
    plan = schedules.by_name[name](4, NUM_MICROBATCHES)
    with case.pipeline(plan, DEVICES[devices][0], issue="threads") as pipe:
        assert_steps_are_plain(pipe, plain, case, 16, 13)


def assert_replays_are_plain(
    home: torch.device, model: str, name: str, devices: str, capture: Literal[True, "step"]
) -> None:
    case = case_on(home, model, 16)
    plain = copy.deepcopy(case.layers)
    plan = schedules.by_name[name](4, NUM_MICROBATCHES)
    with pipeline(case, plan, devices, capture) as pipe:
        assert_steps_are_plain(pipe, plain, case, 16, 16, 16)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_replayed_steps_have_them(home: torch.device, name: str) -> None:
    assert_replays_are_plain(home, "mlp", name, "four parts", capture=True)


# Slow on the host, where tests/runtime/test_recompute_gpus.py has most of them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "capture"), [("dropout", False), ("gpt", False), ("mlp", True), ("mlp", "step")]
)
@pytest.mark.parametrize("level", ["layer", "stage"])
def test_recomputed_steps_have_them(
    level: Level, model: str, capture: Literal[True, False, "step"]
) -> None:
    case = case_on(torch.device("cuda", 0), model, 16)
    plain = copy.deepcopy(case.layers)
    plan = schedules.zb_h1(4, NUM_MICROBATCHES)
    with pipeline(case, plan, "four parts", capture, level) as pipe:
        assert pipe.plan.has(Kind.R)
        assert_steps_are_plain(pipe, plain, case, 16, 16, 16)


# Many, and slow on the host, where tests/runtime/test_capture.py has most of them.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("mlp", "gpipe"),
        ("mlp", "one_f_one_b"),
        ("mlp", "interleaved"),
        ("mlp", "hanayo"),
        ("mlp", "zb_h1"),
        ("mlp", "zb_v"),
        ("gpt", "one_f_one_b"),
    ],
)
@pytest.mark.parametrize("devices", FOURS)
@pytest.mark.parametrize("capture", [True, "step"])
def test_replayed_steps_of_every_kind_have_them(
    model: str, capture: Literal[True, "step"], devices: str, name: str
) -> None:
    assert_replays_are_plain(torch.device("cuda", 0), model, name, devices, capture)


@pytest.mark.parametrize("devices", FOURS)
def test_steps_and_predictions_take_turns(home: torch.device, devices: str) -> None:
    case = case_on(home, "mlp", 8)
    plain = copy.deepcopy(case.layers)
    with pipeline(case, schedules.interleaved(4, 4, 2), devices) as pipe:
        for _ in range(2):
            with torch.no_grad():
                expected = torch.cat([plain(part) for part in case.inputs.split(2)])
            assert torch.equal(pipe(case.inputs), expected)
            assert_steps_are_plain(pipe, plain, case, 8)


# Not on the host, which gives each pipeline a stream of the caller's own.
@pytest.mark.gpu
@pytest.mark.parametrize("devices", FOURS)
def test_two_pipelines_train_one_model(devices: str) -> None:
    case = case_on(torch.device("cuda", 0), "mlp", 8)
    plain = copy.deepcopy(case.layers)
    one, other = schedules.one_f_one_b(4, 4), schedules.hanayo(4, 4, 1)
    with pipeline(case, one, devices) as first, pipeline(case, other, devices) as second:
        for pipe in (first, second, first):
            assert_steps_are_plain(pipe, plain, case, 8)


@pytest.mark.parametrize("devices", FOURS)
def test_a_traced_step_shows_the_plan_in_an_order_that_can_be(
    home: torch.device, devices: str
) -> None:
    case = case_on(home, "mlp", 8)
    plan = schedules.one_f_one_b(4, 4)
    with pipeline(case, plan, devices) as pipe:
        with pipe.tracing():
            pipe.step(case.inputs, target=case.target)
        rows = pipe.timeline().rows
    assert [[span.action for span in row] for row in rows] == [list(row) for row in plan.rows]
    spans = {span.action: span for row in rows for span in row}
    for action, span in spans.items():
        assert span.start_ns <= span.end_ns
        if action.kind is Kind.F and action.stage > 0:
            before = spans[Action(Kind.F, action.stage - 1, action.microbatch)]
            # Streams are compared by the host's clock, which is read beside the GPU's.
            assert before.start_ns < span.end_ns, action


class Fails(nn.Module):
    """Passes on what it gets, until it is told to fail in its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.armed
        if self.calls == 3:
            raise LookupError("the third call")
        return x.clone()


@pytest.mark.parametrize("devices", FOURS)
def test_after_a_failure_the_next_step_has_the_same_bits(home: torch.device, devices: str) -> None:
    case = case_on(home, "mlp", 8)
    fails = Fails()
    case.layers.append(fails)
    plain = copy.deepcopy(case.layers)
    with pipeline(case, schedules.one_f_one_b(4, 4), devices) as pipe:
        assert_steps_are_plain(pipe, plain, case, 8)
        fails.armed = True
        with pytest.raises(LookupError, match="the third call") as raised:
            pipe.step(case.inputs, target=case.target)
        assert raised.value.__notes__ == [
            "pykern: raised in stage 3, microbatch 2, action 3F2, device 3"
        ]
        fails.armed = False
        fails.calls = 0
        del raised
        for model in (pipe, plain):
            model.zero_grad()
        assert_steps_are_plain(pipe, plain, case, 8)

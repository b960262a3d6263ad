"""The values that a user may give for recompute, and their meaning."""

from statistics import fmean
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pykern import schedules
from pykern.kernels import levels as kernels
from pykern.kernels.activation_linear import gated_linear
from pykern.plan import Kind
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.stage.stage import Stage
from tests.runtime.hard_layers import linear
from tests.runtime.models import CASES, Case
from tests.runtime.plans import recomputed, split_backward
from tests.runtime.recomputing import check_steps
from tests.support.pipelines import planned

WRONG: dict[str, tuple[Any, str]] = {
    "auto": ("auto", "recompute must be a level or a Budget, got 'auto'"),
    "level": (
        "layers",
        "recompute of stage 0 must be one of 'none', .* got 'layers'. Did you mean 'layer'",
    ),
    "type": ([3, None], "recompute of stage 0 must be one of .* got 3"),
    "stages": (
        ["layer"],
        "recompute must be one for all, or a list with one for each of 2 stages, got 1",
    ),
    "microbatches": (
        [["layer"], None],
        "recompute of stage 0 must be one for all, or a list with one for each of 3 micro",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_level_is_refused(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        CASES["mlp"](3).pipeline(schedules.gpipe(2, 3), recompute=value)


def test_without_a_backward_nothing_can_be_recomputed() -> None:
    with pytest.raises(
        ValueError, match="recompute must be None for a plan without backwards, got 'layer'"
    ):
        CASES["mlp"](3).pipeline(schedules.forward_only(2, 3), recompute="layer")


def test_levels_of_stages_and_microbatches() -> None:
    levels: Any = ["layer", [None, "stage", "none", "ops", "ops+stash"]]
    with CASES["mlp"](5).pipeline(schedules.gpipe(2, 5), recompute=levels) as pipe:
        plan = pipe.plan
    recomputes = {str(a) for row in plan.rows for a in row if a.kind is Kind.R}
    assert recomputes == {*(f"0R{m}" for m in range(5)), "1R1"}
    check_steps(CASES["mlp"](5), schedules.gpipe(2, 5), levels, [5, 5])


def test_a_plan_with_recomputes_is_run_as_it_is() -> None:
    plan = recomputed(schedules.gpipe(2, 3))
    for level in (None, "layer", "ops", [None, "layer"]):
        check_steps(CASES["gpt"](3), plan, level, [3])
        with CASES["mlp"](3).pipeline(plan, recompute=level) as pipe:
            assert pipe.plan == plan


def test_a_prediction_takes_the_times_of_r() -> None:
    case = CASES["mlp"](6)
    with case.pipeline(recomputed(schedules.gpipe(2, 3))) as pipe:
        pipe.step(case.inputs, target=case.target)
        measured, predicted = pipe.timeline(), pipe.prediction()
    times = [
        [span.end_ns - span.start_ns for span in timeline.rows[0] if span.action.kind is Kind.R]
        for timeline in (measured, predicted)
    ]
    assert [len(of_r) for of_r in times] == [3, 3]
    assert fmean(times[0]) == pytest.approx(fmean(times[1]))


def test_kernels_are_told_their_level() -> None:
    found: list[str] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(kernels.level())
            return super().forward(x)

    layers = nn.Sequential(Asks(6, 6), linear())
    case = Case(layers, torch.randn(4, 6), torch.randn(4, 6), F.mse_loss)
    levels: Any = [["none", "ops+stash", None, "stage"], None]
    check_steps(case, schedules.gpipe(2, 4), levels, [4])
    # The plain model runs first.
    assert found[4:] == ["none", "ops+stash", "ops", "ops", "ops"]


@pytest.mark.parametrize("level", ["none", "ops+stash"])
@pytest.mark.parametrize("split", [False, True])
def test_checkpointing_within_a_layer_repeats_the_level(level: Any, split: bool) -> None:
    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Linear(6, 8)
            self.down = nn.Linear(4, 6)

        def _inner(self, x: Tensor) -> Tensor:
            return gated_linear(self.gate_up(x), self.down.weight, self.down.bias)

        def forward(self, x: Tensor) -> Tensor:
            # It compares what is saved in both, and refuses where that differs.
            return cast(Tensor, checkpoint(self._inner, x, use_reentrant=False))

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    layers = nn.Sequential(linear(), Checkpoints())
    plan = schedules.gpipe(1, 2)
    with planned(layers, split_backward(plan) if split else plan, recompute=level) as pipe:
        pipe.step(x, target=y)
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_r_does_not_go_to_the_host_again() -> None:
    given: list[Tensor] = []

    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x)
            return super().forward(x)

    # A device with nothing but sizes stands for a GPU.
    device = torch.device("meta")
    first, second = Stage(0, [Notes(6, 6, device=device)], device), Stage(1, ())
    first.next, second.previous = second, first
    for _ in range(2):
        for stage in (first, second):
            stage.begin(1, StepSeed(), lambda *_: ((), ()), ["stage"])
        first.take(0, (torch.randn(2, 6),))
        first.forward(0)
        first.recompute(0)
        kept, again = given[-2:]
        assert kept.device == device
        assert again is kept

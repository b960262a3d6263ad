"""Gradients through `pipe(x)` on the fake driver."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern import _C, schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.outside.cases import (
    assert_gradients,
    batch,
    mean_square,
    model,
    plain,
    require_the_bits,
)
from tests.support.pipelines import planned

PLANS: dict[str, Plan] = {
    "gpipe": schedules.gpipe(2, 3),
    "one_f_one_b": schedules.one_f_one_b(4, 3),
    "interleaved": schedules.interleaved(2, 4),
    "zb_v": schedules.zb_v(2, 4),
}


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_the_plain_models(gpus: FakeCuda, name: str, recompute: Any) -> None:
    layers = model()
    with planned(layers, PLANS[name], None, "cuda", recompute=recompute) as pipe:
        require_the_bits(pipe, layers)


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_calls_steps_and_forwards_between_a_call_and_its_backward(
    gpus: FakeCuda, recompute: Any
) -> None:
    layers, plan = model(), schedules.one_f_one_b(3, 4)
    reference = copy.deepcopy(layers)
    with planned(layers, plan, mean_square, "cuda", recompute=recompute) as pipe:
        first = pipe(batch(8))
        second = pipe(batch(5))
        pipe.step(batch(7))
        pipe.zero_grad()
        with torch.no_grad():
            pipe(batch(4))
        mean_square(second).backward()
        mean_square(first).backward()
        plain(reference, batch(5), 4, mean_square)
        plain(reference, batch(8), 4, mean_square)
        assert_gradients(layers, reference)
        # Nobody asks for this one's.
        pipe(batch(8))


def test_a_graph_goes_on_on_both_sides(gpus: FakeCuda) -> None:
    layers, first = model(), nn.Linear(6, 6)
    reference = copy.deepcopy(nn.Sequential(first, layers))
    with planned(layers, schedules.one_f_one_b(2, 3), None, "cuda") as pipe:
        mean_square(pipe(first(batch()).tanh()).tanh()).backward()
        mean_square(reference[1](reference[0](batch()).tanh()).tanh()).backward()
        for mine, theirs in zip(
            [*first.parameters(), *layers.parameters()], reference.parameters(), strict=True
        ):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_failed_backward_leaves_a_pipeline_that_goes_on(gpus: FakeCuda) -> None:
    error: ArithmeticError | None = ArithmeticError("here")

    def fail(_: Tensor) -> None:
        if error is not None:
            raise error

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(fail)
            return out

    layers = nn.Sequential(nn.Linear(6, 6), Layer(6, 6), nn.Linear(6, 6))
    with planned(layers, schedules.one_f_one_b(3, 3), None, "cuda") as pipe:
        with pytest.raises(ArithmeticError) as caught:
            pipe(batch()).sum().backward()
        assert caught.value is error
        assert all(parameter.grad is None for parameter in layers.parameters())
        error = None
        pipe(batch()).sum().backward()
        assert all(parameter.grad is not None for parameter in layers.parameters())


def test_a_half_needs_forwards_first(gpus: FakeCuda) -> None:
    with planned(model(), schedules.one_f_one_b(2, 3), None, "cuda") as pipe:
        lanes = pipe._executor.driver.gpus.lanes  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="must have its forwards first, got 0F2 behind 0B0"):
            _C.StreamProgram.half(pipe.plan, lanes, forwards=True)


@pytest.mark.parametrize("capture", ["auto", True, "step"])
def test_graph_mode_runs_calls_without_graphs(gpus: FakeCuda, capture: Any) -> None:
    layers = model()
    options = {"capture": capture}
    with planned(layers, schedules.one_f_one_b(2, 3), mean_square, "cuda", **options) as pipe:
        for _ in range(3):
            pipe.step(batch(6))
        pipe.zero_grad()
        require_the_bits(pipe, layers)
        # Steps are replayed as before.
        pipe.zero_grad()
        reference = copy.deepcopy(layers)
        pipe.step(batch(6))
        for part in batch(6).split(2):
            (mean_square(reference(part)) / 3).backward()
        assert_gradients(layers, reference)

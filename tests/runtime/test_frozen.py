"""Steps of plans whose first stages have no backward."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Kind, Plan
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step

# By name: a plan of so many stages, and the frozen ones.
PLANS: dict[str, tuple[Callable[[], Plan], list[int]]] = {
    "gpipe": (lambda: schedules.gpipe(4, 4), [0]),
    "one_f_one_b": (lambda: schedules.one_f_one_b(4, 8), [0, 1, 3]),
    "zb_h1": (lambda: schedules.zb_h1(4, 8), [0, 2]),
    "interleaved": (lambda: schedules.interleaved(2, 4), [0, 1]),
    "zb_v": (lambda: schedules.zb_v(2, 4), [0, 1, 2]),
    "chimera": (lambda: schedules.chimera(2, 4), [0]),
}
EVERY_PLAN = pytest.mark.parametrize("name", PLANS)


def layers_of(num_stages: int) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.Tanh()) for _ in range(num_stages))
    )


def made(name: str) -> tuple[Plan, nn.Sequential]:
    """A plan and a model with that of it frozen which the plan does not train."""
    make, frozen = PLANS[name]
    plan = make().with_frozen(frozen)
    layers = layers_of(plan.num_stages)
    for stage in frozen:
        layers[stage].requires_grad_(False)
    return plan, layers


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(8)
    return [(torch.randn(16, 4), torch.randn(16, 4)) for _ in range(3)]


def check_steps(name: str, devices: Any, **options: Any) -> None:
    plan, layers = made(name)
    # Graphs replay the dropout of pykern's kernels alone.
    layers.train("capture" not in options)
    plain = copy.deepcopy(layers)
    with planned(layers, plan, devices=devices, **options) as pipe:
        for x, y in batches():
            state = torch.get_rng_state()
            expected = plain_step(
                plain,
                x,
                y,
                F.mse_loss,
                plan.num_microbatches,
                pipe.partition.stages,
                num_replicas=plan.placement.num_replicas,
            )
            torch.set_rng_state(state)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


@EVERY_PLAN
@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_workers_have_the_bits_of_the_plain_model(name: str, recompute: Any) -> None:
    check_steps(name, "cpu", recompute=recompute)


@EVERY_PLAN
def test_gpus_have_them_too(name: str, gpus: FakeCuda) -> None:
    check_steps(name, "cuda")
    assert gpus.violations == []


@pytest.mark.parametrize("name", [name for name in PLANS if name != "chimera"])
@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("capture", [True, "step"])
def test_graphs_have_them_too(
    name: str, recompute: Any, capture: bool | str, gpus: FakeCuda
) -> None:
    check_steps(name, "cuda", recompute=recompute, capture=capture)
    assert gpus.violations == []


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_gradients_through_the_output(name: str) -> None:
    plan, layers = made(name)
    layers.eval()
    plain = copy.deepcopy(layers)
    with planned(layers, plan) as pipe:
        for x, y in batches():
            loss, expected = F.mse_loss(pipe(x), y), F.mse_loss(plain(x), y)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected)
            for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad)


def test_nothing_of_a_backward_runs_in_front() -> None:
    plan, layers = made("one_f_one_b")
    with planned(layers, plan) as pipe:
        pipe.step(*batches()[0][:1], target=batches()[0][1])
        spans = [span for row in pipe.timeline().rows for span in row]
    assert {span.action.kind for span in spans if span.action.stage < 2} == {Kind.F}


def thawed(layers: nn.Sequential) -> None:
    layers[1].get_parameter("0.bias").requires_grad_(True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "stage"},
        {"devices": "cuda"},
        {"devices": "cuda", "recompute": "stage"},
        {"devices": "cuda", "capture": True},
    ],
    ids=str,
)
def test_what_would_need_a_backward_there_is_refused(
    options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if "devices" in options:
        request.getfixturevalue("gpus")
    plan, layers = made("one_f_one_b")
    layers.eval()
    x, y = batches()[0]
    with planned(layers, plan, **options) as pipe:
        pipe.step(x, target=y)
        before = [None if p.grad is None else p.grad.clone() for p in pipe.parameters()]
        thawed(layers)
        expected = (
            "stage 1 must have nothing to train.* from stage 2 on.* parameter '0.bias' of its"
        )
        with pytest.raises(RuntimeError, match=expected):
            pipe.step(x, target=y)
        # Nothing was added.
        for parameter, gradient in zip(pipe.parameters(), before, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if parameter.grad is not None and gradient is not None:
                assert torch.equal(parameter.grad, gradient)
        with torch.no_grad():
            pipe(x)
        layers[1].requires_grad_(False)
        pipe.step(x, target=y)


def test_a_batch_that_needs_a_gradient_is_refused() -> None:
    plan, layers = made("gpipe")
    x, y = batches()[0]
    with planned(layers, plan) as pipe:
        with pytest.raises(RuntimeError, match=r"stage 0 .* but the batch requires a gradient"):
            F.mse_loss(pipe(x.requires_grad_()), y).backward()
        pipe.step(x.detach(), target=y)


def test_a_recorded_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh() + x)

    model = Two()
    model.first.requires_grad_(False)
    plan = schedules.one_f_one_b(2, 4).with_frozen([0])
    x, y = batches()[0]
    pipe = pykern.Pipeline(model, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss, sample=x[:4])
    with pipe:
        pipe.step(x, target=y)
        model.first.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"stage 0 .* its parameter '.*first.weight' of its"):
            pipe.step(x, target=y)

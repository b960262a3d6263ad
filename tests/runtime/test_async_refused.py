"""Refusals of PipeDream: refused when the pipeline is made, or an error in the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.plan import Plan, with_updates
from pykern.schedules import gpipe, one_f_one_b, pipedream
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.async_runs import OPTIMIZERS, batch, four, layers_of, pipeline
from tests.runtime.models import TrainedLoss


class WritesItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


class PutsABuffer(nn.Linear):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(WritesItsWeight(4, 4), "wrote into its parameter"), (PutsABuffer(), "in the place of a buf")],
)
def test_forwards_that_copies_would_lose_are_errors(layer: nn.Module, message: str) -> None:
    x, y = batch()
    with (
        four(nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), nn.Tanh())) as pipe,
        pytest.raises(RuntimeError, match=message),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("number", [0, 3])
def test_gradients_that_no_update_would_be_of_are_errors(number: int) -> None:
    layers = layers_of()
    weight = next(layers[number].parameters())
    x, y = batch()
    with four(layers, loss_fn=lambda out, to: F.mse_loss(out, to) + weight.square().sum()) as pipe:
        message = f"a parameter of stage {number}.* got a gradient from outside its stage"
        with pytest.raises(RuntimeError, match=message):  # noqa: PT012 - which step is not fixed
            for _ in range(2):
                pipe.step(x, target=y)
    with four() as pipe:
        pipe.step(x, target=y)
        next(pipe.parameters()).sum().backward()
        with pytest.raises(RuntimeError, match=r"stage 0.*a backward of yours"):
            pipe.step(x, target=y)
        # Nothing of it is left.
        pipe.step(x, target=y)


def test_gradients_of_before_are_not_those_of_an_update() -> None:
    x, y = batch()
    found = []
    for left in (None, 3.0):
        torch.manual_seed(0)
        with four() as pipe:
            for parameter in pipe.parameters():
                parameter.grad = None if left is None else torch.full_like(parameter, left)
            pipe.step(x, target=y)
            pipe.flush()
            found.append([parameter.detach() for parameter in pipe.parameters()])
    assert all(map(torch.equal, *found))


class KeepsInGroups(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_an_optimizer_with_state_in_its_groups_is_an_error() -> None:
    x, y = batch()
    with (
        pipeline(layers_of(), "pipedream", 4, lambda p: KeepsInGroups(p, lr=0.1)) as pipe,
        pytest.raises(RuntimeError, match="KeepsInGroups keeps 'count' in its groups"),
    ):
        pipe.step(x, target=y)


def tied() -> nn.Sequential:
    layers = layers_of()
    layers[2].weight = layers[0].weight
    return layers


def one_storage() -> nn.Sequential:
    layers = layers_of(4)
    both = torch.randn(8, 4)
    layers[0].weight, layers[1].weight = (nn.Parameter(part) for part in both.split(4))
    return layers


def with_main_grad() -> nn.Sequential:
    layers = layers_of()
    layers[1].weight.main_grad = torch.zeros(4, 4)  # type: ignore[union-attr]
    return layers


def growing(num_devices: int, num_microbatches: int) -> Plan:
    """Another order for more microbatches."""
    make = gpipe if num_microbatches <= 4 else one_f_one_b
    return with_updates(make(num_devices, num_microbatches), 1, 0)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: four(capture="auto"), "capture must be False here, got 'auto'"),
    (lambda: four(recompute="layer"), "recompute must be None here"),
    (lambda: four(check_finite="grads"), "check_finite must be 'off' or 'loss' here"),
    (lambda: four(deferred_batch_norm=True), "deferred_batch_norm must be False here"),
    (lambda: four(replicas=2), "replicas must be 1 here, got 2"),
    (lambda: four(loss_fn=TrainedLoss()), "loss_fn must have no parameters that train, got some:"),
    (
        lambda: four(tied()),
        r"0.weight \(stage 0\) and 2.weight \(stage 2\) must be two parameters, got one, of "
        r"which both stages would have versions",
    ),
    (
        lambda: four(one_storage()),
        "0.weight and 1.weight must have memory of their own, got shared memory, but each "
        "has versions of its own",
    ),
    (lambda: four(with_main_grad()), "1.weight must collect gradients in .grad, got a main_grad:"),
    (
        lambda: pipeline(layers_of(), "pipedream", 3, OPTIMIZERS["SGD"]),
        "microbatches must be at least the number of devices, 4, .* got 3",
    ),
    (
        lambda: pipeline(layers_of(), "pipedream_2bw", 6, OPTIMIZERS["SGD"]),
        "microbatches must be a multiple of the group after which the schedule updates "
        "weights, got 6 and groups of 4",
    ),
    (
        lambda: pipeline(layers_of(), "gpipe", 4, OPTIMIZERS["SGD"]),
        "schedule must update weights for AsyncPipeline, got 'gpipe'",
    ),
    (
        lambda: pipeline(layers_of(), growing, 4, OPTIMIZERS["SGD"]),
        "the schedule must begin alike for any number of microbatches to go on without "
        "a flush, got another order for fewer",
    ),
    (
        lambda: pykern.AsyncPipeline(
            layers_of(),
            devices="cpu:4",
            schedule=pipedream(4, 4),
            optimizer=OPTIMIZERS["SGD"],
        ),
        "A Plan ends, but such a schedule goes on",
    ),
    (
        lambda: pykern.Pipeline(layers_of(), devices="cpu:4", schedule="pipedream", microbatches=4),
        "the plan must not update weights within a step, got U actions",
    ),
    (
        lambda: pipeline(layers_of(), "pipedream", 4, torch.optim.LBFGS),
        "optimizer must step parameters one by one, got LBFGS, which calls the model "
        "again for each step",
    ),
    (
        lambda: pipeline(
            layers_of(), "pipedream", 4, lambda p: torch.optim.SGD([*p, torch.ones(1)], lr=0.1)
        ),
        "optimizer must have parameters of the model alone, got another in group 0",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[text[:24] for _, text in REFUSED])
def test_what_cannot_be_is_refused_before_anything_starts(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_parameters_that_an_optimizer_gets_later_must_be_of_the_model() -> None:
    x, y = batch()
    with four() as pipe:
        pipe.step(x, target=y)
        pipe.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        message = "optimizer must have parameters of the model alone, got another in group 1"
        with pytest.raises(ValueError, match=message):
            pipe.step(x, target=y)
        with pytest.raises(ValueError, match=message):
            pipe.flush()
        del pipe.optimizer.param_groups[1]
        pipe.step(x, target=y)
        assert pipe.flush() is not None


def test_a_pipeline_takes_no_optimizer() -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["SGD"], "microbatches": 4}
    with pytest.raises(TypeError, match=r"optimizer must be left out .* pykern.AsyncPipeline"):
        pykern.Pipeline(layers_of(), devices="cpu:4", **options)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD([torch.ones(1)], lr=0.1), 3])
def test_an_optimizer_is_a_function(optimizer: Any) -> None:
    with pytest.raises(
        TypeError, match="optimizer must be a function of a list of parameters, got a"
    ):
        pipeline(layers_of(), "pipedream", 4, optimizer)
    with pytest.raises(
        TypeError, match=r"optimizer must return a torch.optim.Optimizer, got a int"
    ):
        pipeline(layers_of(), "pipedream", 4, lambda _: 3)  # type: ignore[arg-type, return-value]


def test_gpus_are_refused(gpus: FakeCuda) -> None:
    with pytest.raises(
        ValueError,
        match="CPU workers for schedules that update weights within a step, got GPUs",
    ):
        pykern.AsyncPipeline(
            layers_of(2),
            devices=["cuda:0", "cuda:1"],
            schedule="pipedream",
            microbatches=2,
            optimizer=OPTIMIZERS["SGD"],
        )


SHAPES: list[torch.Size] = []


class NotesShapes(nn.Module):
    """Notes the shape of each batch with which its own forward, and no recording of it, runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        SHAPES.append(x.shape)
        hidden: Tensor = self.last(self.first(x).tanh())
        return hidden


def test_a_step_that_is_refused_records_no_forward() -> None:
    x = torch.randn(8, 4)
    with pykern.AsyncPipeline(
        NotesShapes(),
        devices="cpu:2",
        schedule="pipedream",
        microbatches=4,
        optimizer=OPTIMIZERS["SGD"],
        loss_fn=F.mse_loss,
        sample=x,
    ) as pipe:
        pipe.step(x, target=x)
        SHAPES.clear()
        with pipe._executor.driver.claim(), pytest.raises(RuntimeError, match="already running"):
            pipe.step(x[:, None], target=x[:, None])
        assert SHAPES == []
        pipe.step(x[:, None], target=x[:, None])
        assert SHAPES

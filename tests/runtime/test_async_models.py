"""Models and optimizers of all kinds under PipeDream: the bits of the rule, applied to the plain
model with each parameter at the version that its stage reads."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

import pykern
from pykern.kernels.head_loss import LinearCrossEntropy
from pykern.models.gpt import gpt
from pykern.runtime.asynchronous.executor import AsyncExecutor
from tests.runtime import update_rules
from tests.runtime.skip_models import Dense, UNet
from tests.runtime.update_rules import MakeOptimizer

NUM_STAGES, MICROBATCHES = 3, 4


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class Versioned:
    """The plain model, and all values that its parameters have had."""

    def __init__(self, pipe: pykern.Pipeline, plain: nn.Module, make: MakeOptimizer) -> None:
        assert isinstance(pipe._executor, AsyncExecutor)
        stage_of = {
            parameter: versions.stage.index
            for versions in pipe._executor.versions
            for layer in versions.stage.originals
            for parameter in layer.parameters()
        }
        self.stage_of = {name: stage_of[value] for name, value in pipe.named_parameters()}
        assert set(self.stage_of.values()) == set(range(NUM_STAGES))
        self.plain = plain
        self.parameters = dict(plain.named_parameters())
        self.optimizer = make(list(plain.parameters()))
        self.history = [self._values()]

    def _values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    def train(self, rows: dict[str, Any], loss_of: Callable[[Any], Tensor]) -> None:
        """On one microbatch, which is one update."""
        number = len(self.history) - 1
        read = {}
        for name, stage in self.stage_of.items():
            version = update_rules.pipedream(number, stage, NUM_STAGES)
            value = self.history[version][name].clone()
            read[name] = value.requires_grad_(self.parameters[name].requires_grad)
        loss_of(functional_call(self.plain, read, (), rows)).backward()
        for name, parameter in self.parameters.items():
            parameter.grad = read[name].grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(self._values())

    def assert_same(self, pipe: pykern.Pipeline) -> None:
        state = self.plain.state_dict()
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, state[name]), name


def run(
    model: nn.Module,
    inputs: Callable[[], dict[str, Tensor]],
    loss_fn: Callable[..., Tensor],
    make: MakeOptimizer = sgd,
    **options: Any,
) -> None:
    """Five steps, each with a batch of its own, then the flush."""
    plain = copy.deepcopy(model)
    pipe = pykern.AsyncPipeline(
        model,
        devices=f"cpu:{NUM_STAGES}",
        schedule="pipedream",
        microbatches=MICROBATCHES,
        loss_fn=loss_fn,
        optimizer=make,
        **options,
    )
    with pipe:
        versioned = Versioned(pipe, plain, make)
        for _ in range(5):
            batch = inputs()
            target = batch.pop("target")
            pipe.step(**batch, target=target)
            cut = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
            for index, part in enumerate(target.chunk(MICROBATCHES)):
                rows = {name: values[index] for name, values in cut.items()}

                def loss_of(output: Any, part: Tensor = part) -> Tensor:
                    return loss_fn(output, part)

                versioned.train(rows, loss_of)
        pipe.flush()
        versioned.assert_same(pipe)


def floats(*names: str, width: int = 6) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(8, width) for name in (*names, "target")}


@pytest.mark.parametrize("kind", [UNet, Dense])
def test_values_that_skip_stages(kind: Callable[[int], nn.Module]) -> None:
    run(kind(4), floats("x"), F.mse_loss, sample={"x": torch.randn(2, 6)})


class Masked(nn.Module):
    """Every block gets what the batch brings for it by name, and one trains no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[1].get_parameter("bias").requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor, shift: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x * mask))
        return x + shift


def test_arguments_by_name_belong_to_their_batch() -> None:
    sample = {name: torch.randn(2, 6) for name in ("x", "mask", "shift")}
    run(Masked(), floats("x", "mask", "shift"), F.mse_loss, sample=sample)


class Twice(nn.Module):
    """Uses one layer twice, in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


def test_weights_that_one_stage_uses_twice() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), Twice(), nn.LSTMCell(6, 6), First())
    run(Named(layers), floats("x"), F.mse_loss, sample={"x": torch.randn(2, 6)})


class First(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0]


class Named(nn.Module):
    """A chain whose argument has a name."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_gpt_whose_loss_does_its_backward_in_the_forward() -> None:
    def tokens() -> dict[str, Tensor]:
        return {"input": torch.randint(11, (8, 5)), "target": torch.randint(11, (8, 5))}

    layers = gpt(vocab=11, layers=1, width=8, heads=2, context=5, fused_loss=True)
    plain = copy.deepcopy(layers)
    with pykern.AsyncPipeline(
        layers,
        devices=f"cpu:{NUM_STAGES}",
        schedule="pipedream",
        microbatches=MICROBATCHES,
        loss_fn=LinearCrossEntropy(),
        optimizer=sgd,
    ) as pipe:
        versioned = Versioned(pipe, plain, sgd)
        for _ in range(5):
            batch = tokens()
            pipe.step(batch["input"], target=batch["target"])
            parts = zip(*(batch[name].chunk(MICROBATCHES) for name in batch), strict=True)
            for ids, target in parts:

                def loss_of(output: Any, target: Tensor = target) -> Tensor:
                    return LinearCrossEntropy()(output, target)

                versioned.train({"input": ids}, loss_of)
        pipe.flush()
        versioned.assert_same(pipe)


KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}
# It wants sparse gradients; it calls for the loss again; of matrices only.
NOT_HERE = {"SparseAdam", "LBFGS", "Muon"}


@pytest.mark.parametrize("name", sorted(KINDS.keys() - NOT_HERE))
def test_any_optimizer_of_torch(name: str) -> None:
    make: Any = KINDS[name]
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    run(
        Named(layers),
        floats("x"),
        F.mse_loss,
        lambda parameters: make(parameters, lr=0.01),
        sample={"x": torch.randn(2, 6)},
    )


def test_groups_may_have_settings_of_their_own() -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices = [each for each in parameters if each.dim() > 1]
        others = [each for each in parameters if each.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.001}]
        return torch.optim.AdamW(groups, lr=0.01)

    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    run(Named(layers), floats("x"), F.mse_loss, make, sample={"x": torch.randn(2, 6)})


def test_losses_may_be_added() -> None:
    """With "sum" an update is of the sums over its microbatches, and so is what is returned."""

    def total(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction="sum") / 10

    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    sample = {"x": torch.randn(2, 6)}
    run(Named(layers), floats("x"), total, sample=sample, reduction="sum")
    with pykern.AsyncPipeline(
        nn.Sequential(nn.Linear(6, 6)),
        devices="cpu:1",
        schedule="pipedream",
        microbatches=2,
        loss_fn=lambda output: output.sum() * 0 + len(output),
        optimizer=sgd,
        reduction="sum",
    ) as pipe:
        assert pipe.step(torch.randn(7, 6)) == 7


def test_the_callers_autocast_is_that_of_the_steps() -> None:
    """Which keeps a weight that it has cast, for as long as that is the weight."""
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    sample = {"x": torch.randn(2, 6)}
    with torch.autocast("cpu", torch.bfloat16):
        run(Named(layers), floats("x"), F.mse_loss, sample=sample)

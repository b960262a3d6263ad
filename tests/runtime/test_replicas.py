"""Two replicas of the stages: one set of parameters, gradients that meet in a REDUCE."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import pykern
from pykern.plan import Kind
from tests.runtime.models import Rows, TrainedLoss
from tests.runtime.plans import split_backward, two_replicas
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step

NUM_MICROBATCHES = 6
PLAN = two_replicas(2, NUM_MICROBATCHES)


def pipeline(*layers: nn.Module) -> pykern.Pipeline:
    return planned(layers, PLAN)


def batch(width: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(NUM_MICROBATCHES, width), torch.randn(NUM_MICROBATCHES, width)


def test_the_plan_gets_its_reductions() -> None:
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4)) as pipe:
        assert pipe.plan.has(Kind.REDUCE)
        x, y = batch()
        pipe.step(x, target=y)
        for timeline in (pipe.timeline(), pipe.prediction()):
            ran = [[span.action for span in row] for row in timeline.rows]
            assert ran == [list(row) for row in pipe.plan.rows]


def test_each_parameter_shows_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(*model) as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert len(list(pipe.modules())) == 3


def test_replicas_follow_what_is_done_to_the_model() -> None:
    """Optimizer steps, new storage, freezing, replaced layers, other modes."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    )
    plain = copy.deepcopy(model)

    def train(layers: nn.Module) -> None:
        torch.optim.SGD(layers.parameters(), lr=0.1).step()

    def move(layers: nn.Module) -> None:
        weight = layers.get_parameter("1.0.weight")
        weight.data = weight.detach() * 2

    def freeze(layers: nn.Module) -> None:
        layers.get_parameter("0.0.bias").requires_grad_(False)

    def replace(layers: nn.Module) -> None:
        block = layers.get_submodule("0")
        assert isinstance(block, nn.Sequential)
        block[1] = nn.ReLU()

    def evaluate(layers: nn.Module) -> None:
        layers.eval()

    def assign(layers: nn.Module) -> None:
        state = {name: value * 0.5 for name, value in layers.state_dict().items()}
        layers.load_state_dict(state, assign=True)

    changes: list[Callable[[nn.Module], None]]
    changes = [train, move, freeze, evaluate, replace, assign]
    with pipeline(*model) as pipe:
        for change in changes:
            x, y = batch()
            expected = plain_step(
                plain, x, y, F.mse_loss, NUM_MICROBATCHES, [range(1), range(1, 2)], num_replicas=2
            )
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
            change(pipe)
            change(plain)
            for layers in (pipe, plain):
                layers.zero_grad()


def test_a_parameters_hooks_see_the_first_replicas_microbatches_and_the_others_sum() -> None:
    layer = nn.Linear(4, 4)
    seen: list[Tensor] = []
    grads: list[Tensor] = []

    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        grads.append(parameter.grad.clone())

    layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    layer.weight.register_post_accumulate_grad_hook(keep)
    x, y = batch()
    with pipeline(layer, nn.Linear(4, 4)) as pipe:
        pipe.step(x, target=y)
    assert len(seen) == len(grads) == NUM_MICROBATCHES // 2 + 1
    total = sum(seen[1:], seen[0])
    assert torch.equal(grads[-1], total)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, total)


def test_a_modules_hooks_fire_for_every_microbatch() -> None:
    layer = nn.Linear(4, 4)
    events: list[str] = []
    x, y = batch()
    with pipeline(nn.Linear(4, 4), layer) as pipe:
        layer.register_forward_hook(lambda *_: events.append("forward"))
        layer.register_full_backward_hook(lambda *_: events.append("backward"))
        pipe.step(x, target=y)
    assert events.count("forward") == events.count("backward") == NUM_MICROBATCHES


def test_forward_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x, _ = batch()
    for plan in (PLAN, PLAN.forward_only()):
        with pykern.Pipeline(model, devices="cpu:2", schedule=plan) as pipe:
            expected = torch.cat([model(row) for row in x.split(1)])
            assert torch.equal(pipe(x), expected)


@pytest.mark.parametrize("split", [False, True])
def test_recurrent_layers_and_shared_parameters(split: bool) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh(), shared, Rows(4, 4)), Rows(4, 4))
    plain = copy.deepcopy(model)
    plan = split_backward(PLAN) if split else PLAN
    x, y = batch()
    with pykern.Pipeline(model, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        for _ in range(2):
            expected = plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES, num_replicas=2)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def with_own_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = layer.forward  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer._compiled_call_impl = layer._call_impl
    return layer


def test_what_torch_compile_returns_is_refused_and_left_alone() -> None:
    inside = nn.Sequential(nn.Linear(4, 4))
    layer: Any = torch.compile(inside, backend="eager")
    with pytest.raises(
        ValueError, match=r"1\.0 must not be the result of torch.compile.*several replicas"
    ):
        pipeline(nn.Linear(4, 4), nn.Sequential(layer))
    assert [name for name, _ in inside.named_modules()] == ["", "0"]


def with_hidden(value: Callable[[nn.Module], object]) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.extra = value(layer)  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.BatchNorm1d(4), "BatchNorm1d.*running statistics"),
        (lambda: spectral_norm(nn.Linear(4, 4)), "_SpectralNorm.*vectors that forwards improve"),
        (lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)), "compiled together"),
        (
            with_own_forward,
            "has a forward of its own",
        ),
        (compiled, "has a _compiled_call_impl of its own"),
        (lambda: with_hidden(lambda layer: [layer.weight]), r"in \.extra"),
        (lambda: with_hidden(lambda layer: {"a": layer.forward}), r"in \.extra"),
        (lambda: with_hidden(lambda _: (nn.Linear(2, 2),)), r"in \.extra"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_layers_that_cannot_have_copies_are_refused(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"1\.0.*{reason}.*several replicas"):
        pipeline(nn.Linear(4, 4), nn.Sequential(make()))


def test_a_loss_that_trains_is_refused() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    loss = TrainedLoss()
    for loss_fn in (loss, loss.forward):
        with pytest.raises(ValueError, match="loss_fn must have no parameters that train"):
            pykern.Pipeline(layers, devices="cpu:2", schedule=PLAN, loss_fn=loss_fn)
    loss.requires_grad_(False)
    with pykern.Pipeline(layers, devices="cpu:2", schedule=PLAN, loss_fn=loss) as pipe:
        x, y = batch()
        pipe.step(x, target=y)


class Recorder(nn.Linear):
    """Trains, and has a hook for others."""

    def record(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        return


def test_layers_that_only_look_like_that_are_accepted() -> None:
    teacher = nn.Linear(4, 4).requires_grad_(False)
    layer = with_hidden(lambda _: [teacher, teacher.weight, nn.Tanh()])
    layer.register_forward_hook(Recorder(4, 4).record)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pykern.Pipeline([layer, norm], devices="cpu:2", schedule=two_replicas(2, 2)) as pipe:
        assert pipe(torch.randn(4, 4)).shape == (4, 4)


class Average(nn.Module):
    """Keeps an average of what it has seen: a new tensor, or written in one of two ways."""

    mean: Tensor

    def __init__(self, way: str = "new") -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.way == "new":
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        elif self.training:
            mean = self.mean if self.way == "in place" else self.mean.data
            mean.mul_(0.9).add_(x.detach().mean(0))
        return x - self.mean


class Constant(nn.Module):
    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("two", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.two


@pytest.mark.parametrize("others", [[], [Constant()]])
def test_buffers_that_a_layer_has_got_since_are_refused(others: list[nn.Module]) -> None:
    """Whether or not the stage has had others, which nothing writes."""
    x, y = batch()
    block = nn.Sequential(nn.Linear(4, 4), *others)
    with pipeline(nn.Linear(4, 4), block) as pipe:
        assert pipe.step(x, target=y).isfinite()
        block.append(Average())
        with pytest.raises(RuntimeError, match=r"stage 1 writes to the buffer '\d.mean'"):
            pipe.step(x, target=y)
        del block[-1]
        assert pipe.step(x, target=y).isfinite()


@pytest.mark.parametrize("way", ["new", "in place", "data"])
@pytest.mark.parametrize("devices", ["cpu", "cuda"])
def test_buffers_that_forwards_write_are_refused(
    way: str, devices: str, request: pytest.FixtureRequest
) -> None:
    """Forwards alone write them too; in eval mode nothing does."""
    if devices == "cuda":
        request.getfixturevalue("gpus")
    x, y = batch()
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Average(way))]
    with planned(layers, PLAN, devices=devices) as pipe:
        message = re.escape("stage 1 writes to the buffer '1.mean' of its layer 0 in a forward")
        with pytest.raises(RuntimeError, match=message):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match=message):
            pipe(x)
        pipe.eval()
        assert pipe.step(x, target=y).isfinite()
        pipe.train()
        with pytest.raises(RuntimeError, match=message):
            pipe.step(x, target=y)

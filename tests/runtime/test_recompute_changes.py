"""Models that are changed between steps, or change themselves: they are watched again."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pykern
from pykern.schedules import gpipe, interleaved, one_f_one_b
from tests.runtime.hard_layers import Aside, Finds, Leaves, linear
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step

LEVELS = (None, "layer", "stage")
Change = Callable[[nn.Sequential], object]


class Count(nn.Module):
    """Has a number that becomes a tensor, as auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.total: float | Tensor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.total = x.detach().sum(0)
        return x.sin()


def frozen() -> list[nn.Module]:
    """The second half leaves something aside, which needs gradients if the first half trains."""
    shared = Aside()
    first = [linear().requires_grad_(False), nn.Tanh(), linear().requires_grad_(False), nn.Tanh()]
    return [*first, Leaves(shared).requires_grad_(False), nn.Tanh(), Finds(shared), linear()]


def linears() -> list[nn.Module]:
    return [linear() for _ in range(4)]


def drops(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return F.dropout(output, 0.5)


def replaced_hooks(layers: nn.Sequential) -> None:
    """As programs do that take all hooks away."""
    layers[1]._forward_hooks = OrderedDict()
    layers[1].register_forward_hook(drops)


class Steered(nn.Linear):
    """Drops values if an attribute, or an argument, says so."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.kind = "keeps"
        self.rate: float | None = None

    def forward(self, x: Tensor, drops: bool = False) -> Tensor:
        y = super().forward(x)
        drops = drops or self.kind == "drops" or self.rate is not None
        return F.dropout(y, 0.5) if drops else y


class Drops(Steered):
    def forward(self, x: Tensor, drops: bool = True) -> Tensor:
        return super().forward(x, drops)


def steered() -> list[nn.Module]:
    return [Steered() for _ in range(4)]


def patched(layers: nn.Sequential) -> None:
    first = layers[0]
    first.forward = lambda x: F.dropout(Steered.forward(cast(Steered, first), x), 0.5)


def norms(layers: nn.Sequential) -> None:
    torch.manual_seed(3)
    torch.nn.utils.spectral_norm(layers[1])


MODELS: dict[str, tuple[Callable[[], list[nn.Module]], Change]] = {
    "an earlier stage trains": (frozen, lambda layers: layers[:3].requires_grad_(True)),
    "a hook draws": (linears, lambda layers: layers[1].register_forward_hook(drops)),
    "a hook draws, in a dictionary of its own": (linears, replaced_hooks),
    "a hook writes buffers": (linears, norms),
    "a string": (steered, lambda layers: setattr(layers[1], "kind", "drops")),
    "a number in place of None": (steered, lambda layers: setattr(layers[1], "rate", 0.5)),
    "another forward": (steered, patched),
    "another class": (steered, lambda layers: setattr(layers[1], "__class__", Drops)),
    "a number is a tensor": (lambda: [linear(), Count(), linear(), Count()], lambda _: None),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_a_change_between_steps(name: str, level: Any) -> None:
    make, change = MODELS[name]
    torch.manual_seed(1)
    layers = nn.Sequential(*make())
    plain = copy.deepcopy(layers)
    with planned(layers, gpipe(2, 2), recompute=level) as pipe:
        for step in range(3):
            if step == 1:
                change(layers)
                change(plain)
            check_step(pipe, plain, torch.randn(4, 6))


@pytest.mark.parametrize("level", LEVELS)
def test_a_batch_may_come_to_need_gradients(level: Any) -> None:
    layers = nn.Sequential(*frozen()[4:])
    plain = copy.deepcopy(layers)
    with planned(layers, gpipe(1, 2), recompute=level) as pipe:
        for needs in (False, True, False):
            check_step(pipe, plain, torch.randn(4, 6, requires_grad=needs))


class WritesWhatIsSaved(nn.Linear):
    """Recomputes by itself, and changes in place what a product has kept for backward.

    Only of ones, so that one microbatch alone is wrong.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        z = checkpoint(super().forward, x, use_reentrant=False) * y
        if bool((x == 1).all()):
            y.mul_(2)
        return cast(Tensor, z)


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_into_what_is_saved_is_told_as_by_torch(level: Any) -> None:
    layers = nn.Sequential(WritesWhatIsSaved(6, 6), linear(), linear(), linear())
    x = torch.cat([torch.ones(2, 6), torch.zeros(2, 6)])
    with planned(layers, gpipe(2, 2), recompute=level) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                pipe.step(x, target=torch.randn(4, 6))


def check_step(pipe: pykern.Pipeline, plain: nn.Sequential, x: Tensor) -> None:
    ours, theirs = (x.detach().requires_grad_(x.requires_grad) for _ in range(2))
    target = torch.randn(len(x), 6)
    loss = plain_step(plain, theirs, target, F.mse_loss, 2, pipe.partition.stages)
    assert torch.equal(pipe.step(ours, target=target), loss)
    assert_same_state(pipe, plain)
    if x.requires_grad:
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


class Seldom(nn.Module):
    """Moves a mean in every fourth forward, as an average that lags behind does."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.count += 1
        if self.count % 4 == 0:
            self.mean.mul_(0.9).add_(y.detach().mean(0))
            y = self.norm(y)
        return y - self.mean


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_buffer_that_the_first_forward_has_left_alone_is_not_written_twice(level: str) -> None:
    """Such a step is refused, since nothing was kept. The following ones keep the buffer."""
    model = nn.Sequential(Seldom(), nn.Tanh(), linear(), nn.Tanh())
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with planned(model, gpipe(2, 3), recompute=level) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match=r"has written to buffer 'mean' of a layer"):
            pipe.step(x, target=y)
        pipe.zero_grad()
        plain = copy.deepcopy(model)
        for _ in range(4):
            found = pipe.step(x, target=y)
            assert torch.equal(found, plain_step(plain, x, y, F.mse_loss, 3))
            assert_same_state(pipe, plain)


def test_a_layer_that_begins_to_write_a_buffer_is_refused_where_r_repeats_layers_alone() -> None:
    writing: list[bool] = []

    class Begins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.register_buffer("mean", torch.zeros(6))
            self.mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            if writing:
                self.mean.add_(y.detach().mean(0))
            return y - self.mean

    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with planned(nn.Sequential(Begins(), linear()), gpipe(2, 3), recompute="stage") as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        writing.append(True)
        with pytest.raises(RuntimeError, match=r"has written to buffer 'mean' of a layer"):
            pipe.step(x, target=y)


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_statistics_that_the_first_forward_has_found_again_move_once(level: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), linear(), nn.Tanh(), linear())
    plain = copy.deepcopy(model)
    y = torch.randn(6, 6)
    with planned(model, gpipe(2, 3), recompute=level) as pipe:
        # The running mean of zeros stays 0.
        for x in (torch.zeros(6, 6), torch.randn(6, 6), torch.randn(6, 6)):
            found = pipe.step(x, target=y)
            assert torch.equal(found, plain_step(plain, x, y, F.mse_loss, 3))
            assert_same_state(pipe, plain)


class Averages(nn.Module):
    """Averages its gradients in a buffer, which forwards leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mean", torch.ones(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.requires_grad and torch.is_grad_enabled():
            y.register_hook(self._average)
        return y

    def _average(self, gradient: Tensor) -> None:
        self.mean.mul_(0.9).add_(gradient.mean(0))


@pytest.mark.parametrize("level", LEVELS)
def test_a_buffer_that_backwards_write_is_not_a_forward_s(level: Any) -> None:
    model = nn.Sequential(Averages(), nn.Tanh(), Averages(), nn.Tanh())
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with planned(model, one_f_one_b(2, 3), recompute=level) as pipe:
        for _ in range(2):
            found = pipe.step(x, target=y)
            assert torch.equal(found, plain_step(plain, x, y, F.mse_loss, 3))
            assert_same_state(pipe, plain)


class Teacher(nn.Module):
    """A layer beside a slow average of it, which each forward moves."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.student, self.teacher = linear(), linear().requires_grad_(False)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
        with torch.no_grad():
            for mine, slow in pairs:
                if self.in_place:
                    slow.mul_(0.9).add_(mine, alpha=0.1)
                else:
                    slow.data = slow.data * 0.9 + mine.data * 0.1
        return torch.add(self.student(x), self.teacher(x))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_parameters_that_forwards_write_are_not_written_twice(level: Any, in_place: bool) -> None:
    model = nn.Sequential(Teacher(in_place=in_place), nn.Tanh(), linear(), nn.Tanh())
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    with planned(model, one_f_one_b(2, 3), recompute=level) as pipe:
        for _ in range(2):
            if level is not None:
                message = r"must leave parameters alone under recompute.* a write to 'weight' of"
                with pytest.raises(RuntimeError, match=message):
                    pipe.step(x, target=y)
                continue
            found = pipe.step(x, target=y)
            assert torch.equal(found, plain_step(plain, x, y, F.mse_loss, 3))
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("num_good_steps", [0, 2])
def test_a_batch_must_not_be_written_before_its_recompute(level: str, num_good_steps: int) -> None:
    x, y = torch.randn(2, 4, 6).unbind()
    writes = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if writes:
            x.zero_()
        return F.mse_loss(output, target)

    # On one worker, on which R of the first stage follows the loss.
    plan = interleaved(1, 2, 2)
    with planned(nn.Sequential(*linears()), plan, loss_fn, recompute=level) as pipe:
        for _ in range(num_good_steps):
            pipe.step(x, target=y)
        writes = True
        with pytest.raises(RuntimeError, match="the batch must stay as it is until recompute"):
            pipe.step(x, target=y)


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_loss_may_write_to_its_target(level: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.sub_(1))

    layers = nn.Sequential(*linears())
    plain = copy.deepcopy(layers)
    x = torch.randn(4, 6)
    with planned(layers, one_f_one_b(2, 2), loss_fn, recompute=level) as pipe:
        for _ in range(3):
            loss = pipe.step(x, target=torch.ones(4, 6))
            expected = plain_step(plain, x, torch.zeros(4, 6), F.mse_loss, 2, pipe.partition.stages)
            assert torch.equal(loss, expected)
            assert_same_state(pipe, plain)

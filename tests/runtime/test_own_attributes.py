"""Attributes that forwards assign to layers of which stages run copies."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.runtime.async_runs import pipeline as without_flush
from tests.runtime.models import Rows
from tests.runtime.plans import two_replicas
from tests.runtime.tied_models import WIDTH, batch, pipeline
from tests.support.pipelines import planned


def still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class Head(nn.Module):
    """Counts its forwards, keeps a running mean, and remembers the last microbatch."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.calls = 0
        self.mean = torch.zeros(weight.shape[1])
        self.fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.last = self.mean.sum()
        if self.calls == self.fails_at:
            raise KeyError("a failing layer")
        return F.linear(x - self.mean, self.weight) / self.calls


class Tied(nn.Module):
    """A forward of its own, with a head that has the weight of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = Head(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.first(x).tanh())
        return y


def tied() -> nn.Sequential:
    model = Tied()
    return nn.Sequential(model.first, nn.Tanh(), model.head)


def by_step(pipe: pykern.Pipeline, x: Tensor, y: Tensor) -> None:
    pipe.step(x, target=y)


def by_loss_outside(pipe: pykern.Pipeline, x: Tensor, y: Tensor) -> None:
    F.mse_loss(pipe(x), y).backward()


def head_of(model: nn.Module) -> Head:
    (head,) = (module for module in model.modules() if isinstance(module, Head))
    return head


def require_same(head: Head, plain: Head) -> None:
    assert head.calls == plain.calls
    assert torch.equal(head.mean, plain.mean)
    assert torch.equal(head.last, plain.last)


@pytest.mark.parametrize("run", [by_step, by_loss_outside])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_that_shares_a_parameter_keeps_what_it_assigns(
    run: Callable[..., None], recorded: bool
) -> None:
    x, y = batch()
    model: nn.Module = Tied() if recorded else tied()
    options: dict[str, Any] = {"sample": x[:2], "whole": ["head"]} if recorded else {}
    plain = copy.deepcopy(model)
    head, plain_head = map(head_of, (model, plain))
    with pipeline(model, **options) as pipe:
        for _ in range(2):
            run(pipe, x, y)
            for part in x.split(2):
                plain(part)
            require_same(head, plain_head)


def test_what_forwards_assign_is_no_change_of_layers_before_their_backward() -> None:
    x, y = batch()
    model = tied()
    with pipeline(model, recompute="layer") as pipe:
        by_loss_outside(pipe, x, y)
    assert head_of(model).calls == 4


def test_a_step_that_fails_leaves_what_its_forwards_have_assigned() -> None:
    x, y = batch()
    model = tied()
    head_of(model).fails_at = 3
    with pipeline(model) as pipe, pytest.raises(KeyError, match="a failing layer"):
        pipe.step(x, target=y)
    assert head_of(model).calls == 3


class Keeps(nn.Linear):
    """Keeps a value of the batch, or one that depends on shapes alone."""

    def __init__(self, *, of_the_batch: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: Any = None
        self.of_the_batch = of_the_batch

    def forward(self, x: Tensor) -> Tensor:
        if self.of_the_batch:
            self.kept = x.detach().mean()
        elif self.kept is None:
            self.kept = torch.arange(x.size(1)), {"width": x.size(1)}
        return super().forward(x)


def test_an_attribute_of_two_stages_must_have_one_value() -> None:
    x, y = batch()
    shared = Keeps(of_the_batch=True)
    message = "stage 1 wrote the attribute 'kept' of a Keeps, which is shared with an earlier"
    with (
        pipeline(nn.Sequential(shared, nn.Tanh(), shared)) as pipe,
        pytest.raises(RuntimeError, match=message),
    ):
        pipe.step(x, target=y)


def test_a_module_of_two_stages_may_fill_a_cache() -> None:
    x, y = batch()
    shared = Keeps(of_the_batch=False)
    with pipeline(nn.Sequential(shared, nn.Tanh(), shared)) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    assert torch.equal(shared.kept[0], torch.arange(WIDTH))


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_versions_of_weights_keep_what_forwards_assign(schedule: str) -> None:
    """The rate is 0, so that the weights are those of the plain model."""
    x, y = batch()
    heads = [Head(nn.Parameter(torch.randn(WIDTH, WIDTH))) for _ in range(2)]
    plain = copy.deepcopy(heads)
    with without_flush(nn.Sequential(*heads), schedule, 4, still) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
            for part in x.split(2):
                plain[1](plain[0](part))
            # The first stage is never behind.
            require_same(heads[0], plain[0])
        pipe.flush()
    require_same(heads[1], plain[1])


def test_a_step_without_a_flush_that_fails_leaves_what_its_forwards_have_assigned() -> None:
    x, y = batch()
    heads = [Head(nn.Parameter(torch.randn(WIDTH, WIDTH))) for _ in range(2)]
    heads[1].fails_at = 3
    with without_flush(nn.Sequential(*heads), "pipedream", 4, still) as pipe:
        with pytest.raises(KeyError, match="a failing layer"):
            pipe.step(x, target=y)
        assert heads[1].calls == 3


class Assigns(nn.Linear):
    """Has replicas in which `assign` runs in each forward."""

    def __init__(self, assign: Callable[[Any, Tensor], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kept: Any = None
        self.number = 0
        self.mean = torch.zeros(WIDTH)
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        self.assign(self, x)
        return super().forward(x)


def count_forwards(module: Any, _: Tensor) -> None:
    module.number += 1


def average(module: Any, x: Tensor) -> None:
    module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)


def average_in_place(module: Any, x: Tensor) -> None:
    module.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)


def remember(module: Any, x: Tensor) -> None:
    module.kept = x.detach()


def decay(module: Any, _: Tensor) -> None:
    module.mean = module.mean + 1


def fill_a_cache(module: Any, x: Tensor) -> None:
    """As rotary embeddings do."""
    if x.size(1) > module.number:
        module.number = x.size(1)
        module.kept = torch.arange(x.size(1)).cos(), torch.arange(x.size(1)).sin()


def note_shape(module: Any, x: Tensor) -> None:
    module.number, module.kept = x.size(1), {"shape": list(x.shape), "dtype": x.dtype}


REFUSED = [
    (count_forwards, "assigns the attribute '1.number'"),
    (average, "assigns the attribute '1.mean'"),
    (average_in_place, "writes into the attribute '1.mean'"),
    (remember, "assigns the attribute '1.kept'"),
]


@pytest.mark.parametrize(
    ("assign", "what", "num_microbatches"),
    [
        *((*case, number) for case in REFUSED for number in (2, 4, 6)),
        # One forward of each replica could be one that fills a cache.
        *((decay, "assigns the attribute '1.mean'", number) for number in (4, 6)),
    ],
)
def test_attributes_that_forwards_of_replicas_assign_are_refused(
    assign: Any, what: str, num_microbatches: int
) -> None:
    x, y = batch(12)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), Assigns(assign))]
    message = f"stage 1 {what} of its layer 0, which replicas would do in no fixed"
    with planned(layers, two_replicas(2, num_microbatches)) as pipe:
        with pytest.raises(RuntimeError, match=message):
            pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match="of its layer 0, which replicas"):
            pipe(x)
        # One row is one microbatch, of the first replica, which runs the layers themselves.
        pipe.step(x[:1], target=y[:1])


@pytest.mark.parametrize("assign", [fill_a_cache, note_shape])
def test_replicas_may_assign_one_value(assign: Any) -> None:
    last = Assigns(assign)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), last)]
    with planned(layers, two_replicas(2, 4)) as pipe:
        for rows in (12, 8, 12):
            x, y = batch(rows)
            assert pipe.step(x, target=y).isfinite()
            assert list(pipe.stream([x, x]))
    assert last.number == WIDTH


class Renews(nn.Linear):
    """Its weight gets new memory in each forward."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.5
        return super().forward(input)


class Follows(nn.Module):
    """A frozen average of a trained weight, which each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.average = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.average.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.weight.lerp_(self.own.weight, 0.5)
            average = self.average(x)
        y: Tensor = self.own(x) + average
        return y


@pytest.mark.parametrize("make", [lambda: Renews(WIDTH, WIDTH), Follows])
def test_parameters_that_forwards_of_replicas_write_are_refused(
    make: Callable[[], nn.Module],
) -> None:
    x, y = batch(12)
    message = "stage 1 writes the parameter '.*weight' of its layer 0, which replicas would do"
    with (
        planned([nn.Linear(WIDTH, WIDTH), make()], two_replicas(2, 4)) as pipe,
        pytest.raises(RuntimeError, match=message),
    ):
        pipe.step(x, target=y)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_weight_norm_of_hooks_runs_in_replicas() -> None:
    """Its hook assigns the weight of each forward, which is the same in all."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))]
    x, y = batch()
    with planned(layers, two_replicas(2, 4)) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            assert pipe.step(x, target=y).isfinite()
            optimizer.step()


def test_references_of_recurrent_layers_are_to_their_own_weights() -> None:
    """Their forwards renew them, in a copy as well."""
    shared = Rows(WIDTH, WIDTH)
    x, y = batch()
    with pipeline(nn.Sequential(shared, nn.Tanh(), shared)) as pipe:
        pipe.step(x, target=y)
    (lstm,) = (module for module in shared.modules() if isinstance(module, nn.RNNBase))
    for reference, weight in zip(lstm._flat_weight_refs, lstm._flat_weights, strict=True):
        assert reference is not None
        assert reference() is weight

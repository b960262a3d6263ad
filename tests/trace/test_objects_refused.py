"""Objects that microbatches would share, and what the sample would decide in them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.trace import CutError, ReplayError, Traced
from pykern.trace.foreign import Withheld

from .caching import ROWS, WIDTH, Block, Cache, Forward, Model, adds, nothing, pipeline, with_cache


def sets_a_number(y: Tensor, cache: Cache) -> None:
    cache.add(y)
    cache.calls = int(y.sum() > 0)


KEPT = Cache()
TABLE = Cache()
TABLE.add(torch.zeros(1))


def with_a_global(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x, KEPT))


def with_a_table(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x, TABLE))


class Locked(Cache):
    def __copy__(self) -> Cache:
        raise TypeError("one only")


def with_one(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(x, Locked()))


def with_a_set(model: Model, x: Tensor) -> Tensor:
    cache: Any = Cache()
    cache.found = set()
    return model.second(model.first(x, cache), cache)


def adds_to_the_set(y: Tensor, cache: Any) -> None:
    cache.found.add(y)


class Slots:
    __slots__ = ("held",)

    held: list[Tensor]


def with_slots(model: Model, x: Tensor) -> Tensor:
    slots = Slots()
    slots.held = []
    return model.second(model.first(x, slots), slots)


def fills_the_slot(y: Tensor, slots: Slots) -> None:
    slots.held.append(y)


REFUSED: dict[str, tuple[Forward, Callable[..., Any], str]] = {
    "a number": (with_cache, sets_a_number, r"first .* reads values .* sets Cache\.calls"),
    "a global": (with_a_global, adds, "first is given a Cache .* outlives the call"),
    "a table": (with_a_table, lambda y, cache: None, "first is given a Cache .* outlives the call"),
    "a set": (with_a_set, adds_to_the_set, r"a set is handed on with tensors"),
    "slots": (with_slots, fills_the_slot, r"a Slots is handed on with tensors"),
    "a lock": (with_one, adds, r"a Locked is handed on that cannot be copied \(one only\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_objects_that_microbatches_would_share_are_refused(case: str) -> None:
    forward, function, message = REFUSED[case]
    try:
        with pytest.raises(CutError, match=message):
            pipeline(Model(forward, function))
    finally:
        KEPT.parts.clear()


def adds_by_value(y: Tensor, cache: Cache) -> None:
    """Reads a value, which the sample decides."""
    if y.detach().sum() > 0:
        cache.add(y)


def reads_all(y: Tensor, cache: Cache) -> Tensor:
    return y * len(cache.parts)


def with_values_of(model: Model, sample: Tensor) -> Traced:
    """Cut by a sample, where the first block computes what has the signs of its input."""
    for layer in (model.before, model.first):
        torch.nn.init.eye_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    return Traced(model, ((sample,), {}), 2, ["second"])


def test_what_depends_on_values_is_not_taken_from_the_sample() -> None:
    """The second block would have been given as many parts as there were for the sample."""
    model = Model(with_cache, adds_by_value, reads_all)
    x = torch.ones(ROWS, WIDTH)
    with pytest.raises(CutError, match=r"first .* reads values of a tensor and sets Cache\.calls"):
        with_values_of(model, x)
    traced = with_values_of(model, -x)
    first, *_ = segments = list(traced.segments.values())
    value: Any = traced.environments([((-x,), {})])[0]
    for segment in segments:
        value = segment(value)
    assert torch.equal(value, model(-x))
    value = first(traced.environments([((x,), {})])[0])
    with pytest.raises(ReplayError, match="leaves something else in a Cache"):
        segments[1](value)


class Holder:
    def __init__(self, cache: Cache) -> None:
        self.cache = cache


class TakesWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(adds), Block(adds)

    def forward(self, x: Tensor, holder: Holder) -> Tensor:
        return self.second(self.first(x, holder.cache), holder.cache)


def test_objects_within_an_argument_are_refused() -> None:
    sample = (torch.randn(ROWS, WIDTH), Holder(Cache()))
    with pytest.raises(CutError, match=r"first is given a Cache .* is an argument of the model"):
        pykern.Pipeline(
            TakesWithin(), devices="cpu:2", microbatches=2, split_at=["second"], sample=sample
        )


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cache: Cache, x: Tensor) -> Tensor:
        cache.add(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradients[0] * 2


def to_a_function(model: Model, x: Tensor) -> Tensor:
    return model.second(model.first(Adds.apply(Cache(), x)))


def test_objects_that_an_autograd_function_fills_are_refused() -> None:
    with pytest.raises(CutError, match=r"Adds is given a Cache \(test_objects_refused\.py:\d+\)"):
        pipeline(Model(to_a_function, nothing))


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(adds), Block(adds)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return self.second(self.first(x, cache), cache)


def test_objects_that_the_model_is_given_are_refused() -> None:
    sample = (torch.randn(ROWS, WIDTH), Cache())
    with pytest.raises(CutError, match=r"first is given a Cache .* is an argument of the model"):
        pykern.Pipeline(
            Takes(), devices="cpu:2", microbatches=2, split_at=["second"], sample=sample
        )


def test_a_withheld_object_tells_what_to_return() -> None:
    withheld = Withheld("Cache")
    with pytest.raises(
        AttributeError, match=r"returns a Cache with tensors, .*: 'keys' is not there"
    ):
        _ = withheld.keys
    with pytest.raises(KeyError, match=r"returns a Cache with tensors, .*: 'keys' is not there"):
        withheld["keys"]

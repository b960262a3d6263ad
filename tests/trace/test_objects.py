"""Objects of unknown classes, such as caches, through which modules hand tensors to each other."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import CutError, Traced
from tests.support.plain_step import by_microbatch

WIDTH, ROWS = 6, 4
Forward = Callable[["Model", Tensor], Any]


class Cache:
    """As those of Hugging Face: a list of parts, one for each layer."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []
        self.pair: tuple[Any, ...] = ()
        self.calls = 0

    def add(self, tensor: Tensor) -> None:
        self.parts.append({"value": tensor})
        self.calls += 1


class Block(nn.Linear):
    """Calls a function with what it computes, and adds what that returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor, *objects: Any) -> Tensor:
        y = super().forward(x).tanh()
        found = self.function(y, *objects)
        return y if found is None else y + found


class Model(nn.Module):
    """Two blocks, one for each stage, and a forward that is given to it."""

    def __init__(self, forward: Forward, first: Callable[..., Any], second: Any = None) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Block(first), Block(second or first)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.before(x))


def with_cache(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    return model.second(model.first(x, cache), cache)


def adds(y: Tensor, cache: Cache) -> None:
    cache.add(y)


def reads_the_first(y: Tensor, cache: Cache) -> Tensor:
    assert cache.calls == 1
    return cache.parts[0]["value"] * y


def pipeline(model: nn.Module, **options: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        split_at=["second"],
        sample=torch.randn(ROWS, WIDTH),
        loss_fn=F.mse_loss,
        **options,
    )


def assert_same(model: Model, **options: Any) -> None:
    plain = copy.deepcopy(model)
    x, y = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, WIDTH)
    parts = list(zip(x.split(ROWS), y.split(ROWS), strict=True))
    with pipeline(model, **options) as pipe:
        for _ in range(2):
            wanted = by_microbatch(
                plain, [ROWS] * 4, lambda i, _: F.mse_loss(plain(parts[i][0]), parts[i][1])
            )
            assert torch.equal(pipe.step(x, target=y), wanted)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                assert torch.equal(ours.grad, theirs.grad)
        pipe.eval()
        with torch.no_grad():
            expected = torch.cat([plain.eval()(part) for part, _ in parts])
        assert torch.equal(pipe(x), expected)


def filled_by_the_forward(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    cache.add(x * 2)
    cache.pair = (x * 3, (1, [x * 4]))
    return model.second(model.first(x, cache), cache)


def reads_pair(y: Tensor, cache: Cache) -> Tensor:
    assert cache.pair[1][0] == 1
    return cache.pair[0] + cache.pair[1][1][0] + cache.parts[0]["value"] * y


def given_twice(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    return model.second(model.first(x, cache, cache), cache, {"again": cache})


def adds_and_looks(y: Tensor, cache: Cache, again: Cache) -> None:
    cache.add(y)
    assert again.parts[0]["value"] is y


def looks_again(y: Tensor, cache: Cache, again: dict[str, Cache]) -> Tensor:
    cache.add(y)
    return again["again"].parts[1]["value"] * cache.parts[0]["value"]


def written_in_place(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    cache.add(torch.zeros(ROWS, WIDTH))
    return model.second(model.first(x, cache), cache)


def writes(y: Tensor, cache: Cache) -> None:
    cache.parts[0]["value"].copy_(y.detach())


def with_a_constant(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    cache.add(torch.ones(()))
    return model.second(model.first(x, cache), cache)


def moves(y: Tensor, cache: Cache) -> None:
    """As caches with a window: to where it is already, which no operation shows."""
    cache.parts[0]["value"] = cache.parts[0]["value"].to(y.device)


def read_by_the_forward(model: Model, x: Tensor) -> Tensor:
    cache = Cache()
    y = model.first(x, cache)
    kept: Tensor = cache.parts[0]["value"]
    return model.second(y * kept.shape[1]) + kept


def nothing(_: Tensor) -> None:
    """Without a cache."""


CASES: dict[str, tuple[Forward, Callable[..., Any], Callable[..., Any]]] = {
    "filled by a block": (with_cache, adds, reads_the_first),
    "filled by the forward": (filled_by_the_forward, reads_pair, reads_pair),
    "given twice": (given_twice, adds_and_looks, looks_again),
    "written in place": (written_in_place, writes, reads_the_first),
    "moved": (with_a_constant, moves, reads_the_first),
    "read by the forward": (read_by_the_forward, adds, nothing),
}


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_hand_tensors_on_in_objects(case: str, recompute: str, schedule: str) -> None:
    """Each microbatch has objects of its own; caches were refused."""
    assert_same(Model(*CASES[case]), recompute=recompute, schedule=schedule)


def test_tensors_that_nobody_reads_stay_in_their_stage() -> None:
    """A decoder layer reads its own part of a cache, and is given all of it."""
    traced = Traced(Model(with_cache, adds), ((torch.randn(ROWS, WIDTH),), {}), 2, ["second"])
    traced.cut([range(2), range(2, 3)], [torch.device("cpu")] * 2, lambda *_: True)
    (cut_tape,) = next(iter(traced._cut_tapes.values()))
    assert [len(near) for near, _ in cut_tape.ways] == [1, 1, 0]


def returns_the_cache(model: Model, x: Tensor) -> Any:
    cache = Cache()
    return {"y": model.second(model.first(x, cache), cache), "cache": cache}


def test_an_output_says_which_object_is_not_returned() -> None:
    with pipeline(Model(returns_the_cache, adds)) as pipe:
        found = pipe(torch.randn(4 * ROWS, WIDTH))
        assert found["y"].shape == (4 * ROWS, WIDTH)
        with pytest.raises(AttributeError, match=r"returns a Cache with tensors, which .* 'parts'"):
            _ = found["cache"].parts


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


REFUSED: dict[str, tuple[Forward, Callable[..., Any], str]] = {
    "a number": (with_cache, sets_a_number, r"first .* reads values .* sets Cache\.calls"),
    "a global": (with_a_global, adds, "first is given a Cache .* outlives the call"),
    "a table": (with_a_table, lambda y, cache: None, "first is given a Cache .* outlives the call"),
    "a lock": (with_one, adds, r"a Locked that passes between modules cannot be copied"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_objects_that_microbatches_would_share_are_refused(case: str) -> None:
    forward, function, message = REFUSED[case]
    try:
        with pytest.raises(CutError, match=message):
            pipeline(Model(forward, function))
    finally:
        KEPT.parts.clear()


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
    with pytest.raises(CutError, match=r"Adds is given a Cache \(test_objects\.py:\d+\)"):
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

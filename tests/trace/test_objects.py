"""Objects of unknown classes, such as caches, through which modules hand tensors to each other."""

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.trace import Traced
from tests.support.comparison import assert_all_have_gradients, assert_same_gradients
from tests.support.plain_step import by_microbatch

from .caching import (
    ROWS,
    WIDTH,
    Block,
    Cache,
    Forward,
    Model,
    adds,
    nothing,
    pipeline,
    reads_the_first,
    with_cache,
)


def assert_same(model: Model, **options: Any) -> None:
    plain = copy.deepcopy(model)
    x, y = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, WIDTH)
    parts = list(zip(x.split(ROWS), y.split(ROWS), strict=True))
    with pipeline(model, **options) as pipe:
        for _ in range(3):
            wanted = by_microbatch(
                plain, [ROWS] * 4, lambda i, _: F.mse_loss(plain(parts[i][0]), parts[i][1])
            )
            assert torch.equal(pipe.step(x, target=y), wanted)
            assert_same_gradients(model, plain)
            assert_all_have_gradients(plain)
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


class Empty:
    pass


def with_an_empty_one(model: Model, x: Tensor) -> Tensor:
    empty = Empty()
    return model.second(model.first(x, empty), empty)


def sets_or_reads(y: Tensor, empty: Any) -> Tensor | None:
    if hasattr(empty, "queue"):
        found: Tensor = empty.queue[0] * y
        return found
    empty.queue = deque([y, y * 2])
    empty.queue.append(empty)
    return None


CASES: dict[str, tuple[Forward, Callable[..., Any], Callable[..., Any]]] = {
    "filled by a block": (with_cache, adds, reads_the_first),
    "filled by the forward": (filled_by_the_forward, reads_pair, reads_pair),
    "given twice": (given_twice, adds_and_looks, looks_again),
    "written in place": (written_in_place, writes, reads_the_first),
    "filled when it was empty": (with_an_empty_one, sets_or_reads, sets_or_reads),
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
    (cut_tape,) = traced._cut_tapes
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


class Hands(Block):
    def forward(self, x: Tensor, *objects: Any) -> Any:
        return super().forward(x, *objects), *objects


def test_objects_that_are_returned_do_not_keep_the_samples_tensors() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def forward(model: Model, x: Tensor) -> Tensor:
        cache = Cache()
        y, cache = model.first(x, cache)
        kept.append(weakref.ref(cache.parts[0]["value"]))
        return model.second(y, cache)

    model = Model(forward, adds, reads_the_first)
    model.first = Hands(adds)
    traced = Traced(model, ((torch.randn(ROWS, WIDTH),), {}), 2, ["second"])
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * len(kept)
    del traced

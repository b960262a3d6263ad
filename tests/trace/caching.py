"""Models whose blocks hand tensors to each other in objects of unknown classes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

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


def nothing(_: Tensor) -> None:
    """Without a cache."""

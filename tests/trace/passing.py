"""Ways to pass a value between modules beside the arguments, and models that use them."""

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

WIDTH, ROWS, MICROBATCHES = 8, 8, 4
# Gets or sets what is passed, for a module.
Get = Callable[[nn.Module], Any]
Put = Callable[[nn.Module, Any], object]

SPACE = SimpleNamespace(value=1.0)
DICT: dict[str, Any] = {"value": 1.0}
LIST: list[Any] = [1.0]
VALUE: Any = 1.0
VARIABLE: ContextVar[Any] = ContextVar("VARIABLE", default=1.0)
LOCAL = threading.local()
LOCAL.value = 1.0


def _set_global(_: nn.Module, value: Any) -> None:
    global VALUE  # noqa: PLW0603 - one of the ways
    VALUE = value


def _closure() -> tuple[Get, Put]:
    kept: Any = 1.0

    def put(_: nn.Module, value: Any) -> None:
        nonlocal kept
        kept = value

    return lambda _: kept, put


WAYS: dict[str, tuple[Get, Put]] = {
    "attribute": (lambda _: SPACE.value, lambda _, value: setattr(SPACE, "value", value)),
    "dict": (lambda _: DICT["value"], lambda _, value: DICT.__setitem__("value", value)),
    "list": (lambda _: LIST[0], lambda _, value: LIST.__setitem__(0, value)),
    "global": (lambda _: VALUE, _set_global),
    "closure": _closure(),
    "context variable": (lambda _: VARIABLE.get(), lambda _, value: VARIABLE.set(value)),
    "thread-local": (
        lambda _: getattr(LOCAL, "value", 1.0),
        lambda _, value: setattr(LOCAL, "value", value),
    ),
}


def nothing(*_: object) -> None:
    """Neither gets nor sets."""


class Block(nn.Module):
    """Multiplies by what it gets, and sets what it has computed."""

    buffer: Tensor

    def __init__(self, get: Get = nothing, put: Put = nothing) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.get, self.put = get, put
        self.register_buffer("buffer", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        given = self.get(self)
        if given is not None:
            y = y * given  # reads
        self.put(self, y)
        return y


class Leaf(nn.Linear):
    """The same without modules within, so that it cannot be looked into."""

    def __init__(self, get: Get = nothing, put: Put = nothing) -> None:
        super().__init__(WIDTH, WIDTH)
        self.get, self.put = get, put

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        given = self.get(self)
        if given is not None:
            y = y * given  # reads
        self.put(self, y)
        return y


class Outer(nn.Module):
    """Blocks, with something done before each."""

    def __init__(self, blocks: Sequence[nn.Module], before: Put = nothing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before(self, x)
        for block in self.blocks:
            x = block(x)
        return x


def detached(put: Put) -> Put:
    """Sets the mean of what is given, as a tensor without a graph."""
    return lambda module, y: put(module, y.detach().mean())


def number(put: Put) -> Put:
    """Sets the mean of what is given, as a number."""
    return lambda module, y: put(module, y.mean().item())


def chain(get: Get, put: Put, *, writer: int = 0, reader: int = 3) -> nn.Sequential:
    """Four blocks, of which one sets and one gets."""
    return nn.Sequential(
        *(
            Block(get if at == reader else nothing, put if at == writer else nothing)
            for at in range(4)
        )
    )


def batch() -> tuple[Tensor, Tensor]:
    """Input and target."""
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def pipeline(model: nn.Module, devices: int, loss_fn: Any = F.mse_loss, **options: Any) -> Any:
    """A pipeline of a model of this file."""
    if not isinstance(model, nn.Sequential):
        options["sample"] = torch.randn(ROWS // MICROBATCHES, WIDTH)
    return pykern.Pipeline(
        model, devices=f"cpu:{devices}", microbatches=MICROBATCHES, loss_fn=loss_fn, **options
    )


def assert_same(model: nn.Module, devices: int, loss_fn: Any = F.mse_loss, **options: Any) -> None:
    """Three steps have the gradients of the plain model, bit for bit."""
    x, y = batch()
    parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    for part, target in parts:
        (loss_fn(model(part), target) / MICROBATCHES).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    with pipeline(model, devices, loss_fn, **options) as pipe:
        for _ in range(3):
            model.zero_grad()
            pipe.step(x, target=y)
            for parameter, gradient in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def step(model: nn.Module, devices: int, loss_fn: Any = F.mse_loss, **options: Any) -> None:
    """One step."""
    x, y = batch()
    with pipeline(model, devices, loss_fn, **options) as pipe:
        pipe.step(x, target=y)

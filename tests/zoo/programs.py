"""Models whose forward was made by a tool, and chains, which pykern runs without recording."""

import copy
import warnings
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .case import ROWS, WIDTH, Case, linears, mean_square, vectors


class Small(nn.Module):
    """Nine layers with residuals, as something to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * scale
        return self.norm(x)


class Masked(nn.Module):
    """A layer of a chain that takes a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(x)).masked_fill(mask, 0.0) * scale


class Bags(nn.Module):
    """Integers in, of which the forward counts some."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, WIDTH, mode="mean")
        self.words = nn.Embedding(9, WIDTH, padding_idx=0)
        self.layers = linears(7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bag(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        used = (ids != 0).unsqueeze(-1)
        return (self.words(ids) * used).sum(1) / used.sum(1).clamp(min=1) + x


@cache
def _program() -> torch.export.ExportedProgram:
    rows = {0: torch.export.Dim("rows", min=1)}
    # Made once, it must not have the random numbers of whoever asks first.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        example = torch.randn(4, WIDTH), torch.randn(4, 1)
        return torch.export.export(Small(), example, dynamic_shapes=(rows, rows))


def _exported() -> nn.Module:
    with warnings.catch_warnings():
        # The warning is of a copy: torch's own copying of its specs is out of date.
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(_program()).module()


def _chain() -> nn.Sequential:
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def _masked_chain() -> Case:
    layers = [layer for _ in range(4) for layer in (Masked(), nn.Dropout(0.2))]
    named = {"mask": vectors() > 1, "scale": 1.25}
    return Case(nn.Sequential(*layers), (vectors(),), mean_square, kwargs=named, draws=True)


CASES: dict[str, Callable[[], Case]] = {
    "exported": lambda: Case(
        _exported(),
        (vectors(), vectors(1)),
        F.mse_loss,
        vectors(),
        has_modes=False,
        refuses_replicas="GuardsFn",
    ),
    "fx": lambda: Case(fx.symbolic_trace(Small()), (vectors(), vectors(1)), F.mse_loss, vectors()),
    "bags": lambda: Case(Bags(), (torch.randint(9, (ROWS, 4)),), mean_square),
    "chain": lambda: Case(_chain(), (vectors(),), F.mse_loss, vectors()),
    "masked_chain": _masked_chain,
}

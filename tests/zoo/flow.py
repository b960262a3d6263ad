"""Forwards that do more than to call modules: loops, branches, writes, functions of parameters."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import ROWS, WIDTH, Case, linears, mean_square, vectors


class Functional(nn.Module):
    """No modules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(8))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        for weight in self.weights:
            x = F.layer_norm(F.linear(x, weight).tanh(), (WIDTH,))
        return x


class Shapes(nn.Module):
    """Its work depends on the number of rows and on their length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.arange(x.shape[1], dtype=x.dtype) / x.size(1)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * scale[:, None]
            if len(x) > 2 and number % 2 == 0:
                x = x - x.mean(1, keepdim=True)
        total = torch.zeros(x.shape[0], WIDTH)
        for step in range(x.shape[1]):
            total = total + x[:, step] * (step + 1)
        return total


class Guarded(nn.Module):
    """Its work depends on values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        everything = bool(mask.all())
        for number, layer in enumerate(self.layers):
            y = layer(x) if everything else layer(x.masked_fill(~mask, 0.0))
            x = x + torch.sin(y)
            if mask.sum() > 5 and number == 3:
                x = x / 2
        return x


class InPlace(nn.Module):
    """Writes into what it has computed, also across layers, and into views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            y = self.relu(layer(x)) * 1.5
            y += x
            y[:, :2] *= 0.5
            total += y
            x = torch.cos(y)
        total.div_(len(self.layers))
        return total


class Square(torch.autograd.Function):
    """x² with a backward of its own, which is not quite the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * x * ctx.scale, None


class CustomFunction(nn.Module):
    """An autograd function between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(8)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = Square.apply(torch.tanh(layer(x)), 1.5 + number)
        return x


class Gates(nn.Module):
    """Every layer has a learned share in the sum, read from one vector of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(7)
        self.into = nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ParameterList(torch.zeros(()) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for gate, layer in zip(self.gates, self.layers, strict=True):
            share = torch.sigmoid(gate)
            x = (1 - share) * x + share * torch.relu(layer(x))
        return x


class Hyper(nn.Module):
    """The weights of a part are computed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.makers = nn.ModuleList(nn.Linear(3, WIDTH * WIDTH) for _ in range(8))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        for maker in self.makers:
            weights = maker(task).unflatten(-1, (WIDTH, WIDTH))
            x = torch.tanh(torch.einsum("bi,bij->bj", x, weights))
        return x


class TopK(nn.Module):
    """Rows choose two experts; all experts compute all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        best, chosen = shares.topk(2, dim=-1)
        weights = torch.zeros_like(shares).scatter(-1, chosen, best)
        y = torch.einsum("bi,eij,be->bj", x, self.up, weights)
        return x + y, (shares.mean(0) * weights.gt(0).float().mean(0)).sum()


class Sparse(nn.Module):
    """Each expert computes the rows that have chosen it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = linears(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * best[rows, None])
        return x + y, best.square().mean()


class Mixture(nn.Module):
    """Adds up what its layers say of how evenly they are used."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        auxiliary = torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary = auxiliary + balance
        return self.head(x), auxiliary / len(self.layers)


class Graph(nn.Module):
    """Messages along the edges of a graph that comes with the input; a buffer of powers."""

    powers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.nodes = linears(5)
        self.edges = linears(4)
        self.register_buffer("powers", torch.linspace(0.1, 1, WIDTH))

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        degree = adjacent.sum(-1, keepdim=True).clamp(min=1)
        for node, edge in zip(self.nodes, self.edges, strict=False):
            messages = adjacent.to(x.dtype) @ edge(x) / degree
            x = torch.relu(node(x) + messages) * self.powers
        return self.nodes[4](x).mean(1)


def _guarded() -> Case:
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    mask[ROWS // 2, 2:] = False
    mask[-1, 1:] = False
    return Case(Guarded(), (vectors(),), mean_square, kwargs={"mask": mask})


def _mixture(layer: Callable[[], nn.Module]) -> Case:
    def loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(output[0], labels) + 0.01 * output[1]

    return Case(Mixture(layer), (vectors(),), loss, torch.randint(3, (ROWS,)))


CASES: dict[str, Callable[[], Case]] = {
    "functional": lambda: Case(Functional(), (vectors(),), F.mse_loss, vectors()),
    "shapes": lambda: Case(Shapes(), (vectors(3, WIDTH),), mean_square),
    "guarded": _guarded,
    "in_place": lambda: Case(InPlace(), (vectors(),), F.mse_loss, vectors()),
    "custom_function": lambda: Case(CustomFunction(), (vectors(),), F.mse_loss, vectors()),
    "gates": lambda: Case(Gates(), (vectors(),), F.mse_loss, vectors()),
    "hyper": lambda: Case(Hyper(), (vectors(), vectors(3)), mean_square),
    "top_k": lambda: _mixture(TopK),
    "sparse": lambda: _mixture(Sparse),
    "graph": lambda: Case(Graph(), (vectors(3, WIDTH), vectors(3, 3) > 0), mean_square),
}

"""Graph networks as torch_geometric writes them, on batches of graphs that have a row each.

Its dense layers take the adjacency of each graph; its others one set of edges for all, as road
networks have it: a buffer. torch_geometric is not needed to develop pykern:
`pip install --no-deps torch_geometric xxhash requests urllib3 charset_normalizer certifi`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case

from .loss import mean_of_squares

ROWS, NODES, WIDTH = 4, 6, 8
LAYERS = 4

# With what they are made with beside the widths.
DENSE: dict[str, dict[str, Any]] = {
    "DenseGCNConv": {},
    "DenseGATConv": {"heads": 2, "concat": False},
    "DenseSAGEConv": {},
    "DenseGraphConv": {},
}
STATIC: dict[str, dict[str, Any]] = {
    "GCNConv": {},
    "ChebConv": {"K": 2},
    "SAGEConv": {},
    "GraphConv": {},
    "TAGConv": {"K": 2},
    "ARMAConv": {},
    "SGConv": {"K": 2},
    "LEConv": {},
    "MFConv": {},
    "ClusterGCNConv": {},
    "ResGatedGraphConv": {},
}


class Dense(nn.Module):
    """Layers that take features and adjacency, with a residual around each."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x, adjacency).relu()
        return self.head(x.mean(1))


class Static(nn.Module):
    """Layers that take features and one list of edges, which is the model's own."""

    edges: Tensor

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        ring = torch.arange(NODES)
        pairs = torch.cat([torch.stack([ring, ring.roll(1)]), torch.stack([ring.roll(1), ring])], 1)
        self.register_buffer("edges", pairs)
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x, self.edges)) + x
        return self.head(x.mean(1))


class Pooled(nn.Module):
    """Pools the nodes between layers, whose losses beside the output count too."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        graphs = import_module("torch_geometric.nn")

        layer = graphs.DenseSAGEConv
        self.pool = getattr(graphs, pool)
        self.first, self.second, self.third = layer(3, WIDTH), layer(WIDTH, WIDTH), layer(WIDTH, 2)
        self.assign = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Sequence[Tensor]:
        x = self.first(x, adjacency).relu()
        x, adjacency, *losses = self.pool(x, adjacency, self.assign(x))
        x = self.second(x, adjacency).relu()
        return [self.third(x, adjacency).mean(1), *losses]


def _batch() -> tuple[Tensor, Tensor]:
    edges = (torch.rand(ROWS, NODES, NODES) > 0.5).float()
    return torch.randn(ROWS, NODES, 3), ((edges + edges.transpose(1, 2)) > 0).float()


def _layers(model: type[Dense | Static], name: str, options: dict[str, Any]) -> Case:
    graphs = import_module("torch_geometric.nn")

    make = partial(getattr(graphs, name), WIDTH, WIDTH, **options)
    args = _batch()[: 2 if model is Dense else 1]
    return Case(model(make).train(), args, mean_of_squares, rows=ROWS)


def _gin() -> Case:
    graphs = import_module("torch_geometric.nn")

    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        return graphs.DenseGINConv(inner)

    return Case(Dense(make).train(), _batch(), mean_of_squares, rows=ROWS)


def _pooled(pool: str) -> Case:
    return Case(Pooled(pool).train(), _batch(), mean_of_squares, rows=ROWS)


CASES: dict[str, Callable[[], Case]] = {
    **{f"torch_geometric {n}": partial(_layers, Dense, n, how) for n, how in DENSE.items()},
    **{f"torch_geometric {n}": partial(_layers, Static, n, how) for n, how in STATIC.items()},
    "torch_geometric DenseGINConv": _gin,
    "torch_geometric dense_diff_pool": partial(_pooled, "dense_diff_pool"),
    "torch_geometric dense_mincut_pool": partial(_pooled, "dense_mincut_pool"),
}

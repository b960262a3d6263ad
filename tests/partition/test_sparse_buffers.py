"""Layers with sparse buffers, such as the edges of a graph, recorded, measured and verified."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.partition.profile import layer_bytes
from pykern.tensors.parameters import num_bytes

WIDTH, ROWS = 8, 2
X = torch.randn(4 * ROWS, WIDTH)
# Each makes a sparse tensor of a dense one.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "pairs": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[CR] tensor support is in beta")


class Mixes(nn.Module):
    """Mixes the rows of its input along edges."""

    edges: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("edges", KINDS[kind](torch.eye(ROWS).flip(0)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, x)


class Recorded(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), Mixes(kind)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


def layers(kind: str) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), Mixes(kind), nn.Linear(WIDTH, WIDTH)]


def pipeline(model: Any, **options: Any) -> pykern.Pipeline:
    return pykern.Pipeline(model, devices="cpu:2", microbatches=4, loss_fn=F.mse_loss, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balance", ["time", "memory"])
def test_they_are_measured(balance: Any, kind: str) -> None:
    with pipeline(layers(kind), balance=balance, sample=X[:ROWS]) as pipe:
        assert pipe.step(X, target=X).isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_recorded_and_verified(kind: str) -> None:
    with pipeline(Recorded(kind), sample=X[:ROWS], verify=True) as pipe:
        assert pipe.step(X, target=X).isfinite()


BUDGET = pykern.Budget(2**20, sample=X[:ROWS], target=X[:ROWS])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"recompute": "stage"}, {"recompute": BUDGET}, {"replicas": 2, "devices": "cpu:4"}]
)
def test_they_may_be_recomputed_and_in_replicas(options: Any, kind: str) -> None:
    model = layers(kind)
    with pipeline(model) as pipe:
        expected = pipe.step(X, target=X)
    with pykern.Pipeline(
        model, **{"devices": "cpu:2", "microbatches": 4, "loss_fn": F.mse_loss, **options}
    ) as pipe:
        for _ in range(2):
            assert torch.equal(pipe.step(X, target=X), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_their_bytes_are_counted(kind: str) -> None:
    # Values of four bytes and indices of eight, by place or by row.
    expected = ROWS * (4 + 2 * 8 if kind == "pairs" else 4 + 8) + (kind != "pairs") * (ROWS + 1) * 8
    assert num_bytes(Mixes(kind).edges) == expected
    assert layer_bytes(layers(kind), X[:ROWS])[1] == 0
    with pipeline(layers(kind)) as pipe:
        held = pipe.memory(X, target=X).devices
        assert sum(device.buffers for device in held) == expected
        assert all(device.activations for device in held)


class ToSparse(nn.Linear):
    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](super().forward(x))


class OfSparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


def test_sparse_values_between_layers() -> None:
    """Such a pipeline has run its steps, and had errors of torch where bytes and times were
    measured."""
    model = nn.Sequential(ToSparse("pairs"), OfSparse(WIDTH, WIDTH))
    rows = X[:ROWS]
    budget = pykern.Budget(1e9, sample=rows, target=rows)
    pipeline(model, recompute=budget)
    for balance in ("time", "memory"):
        pipeline(model, balance=balance, sample=rows)
    with pipeline(model) as pipe:
        pipe.step(X, target=X)
        pipe.profile(X, target=X, steps=1)
        held = pipe.memory(X, target=X)
    given: dict[str, Any] = {"sample": rows, "target": rows, "loss_fn": F.mse_loss}
    found = None
    for with_values in (False, True):
        found = pykern.estimate(model, devices=2, microbatches=4, with_values=with_values, **given)
    # Two indices of 8 bytes beside each value, whose number is known with values alone.
    assert found is not None
    assert found.handed_bytes[0] == ROWS * WIDTH * (4 + 2 * 8)
    assert all(one.activations for one in held.devices)
    assert f"{ROWS * WIDTH * 20}" in pykern.explain_cut(model, rows)

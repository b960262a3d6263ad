"""Layers that write their own parameters, called in grad mode."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.outside.cases import MICROBATCHES, WIDTH, batch, mean_square, pipeline
from tests.support.writing_layers import Decays, Renewed


@pytest.mark.parametrize("recompute", [None, "layer"])
@pytest.mark.parametrize("kind", [Decays, Renewed])
def test_a_call_in_grad_mode_writes_parameters(kind: type[nn.Linear], recompute: Any) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), kind(WIDTH, WIDTH))
    plain = copy.deepcopy(layers)
    with pipeline(layers, recompute=recompute) as pipe:
        for _ in range(2):
            mean_square(pipe(batch())).backward()
            for part in batch().chunk(MICROBATCHES):
                plain(part)
    for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Sparse(nn.Module):
    """A trained matrix whose values have no storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x.t()).t()


def test_a_call_in_grad_mode_takes_sparse_parameters() -> None:
    linears = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    # torch makes no deep copy of a sparse parameter.
    plain = nn.Sequential(*copy.deepcopy(linears), Sparse())
    layers = nn.Sequential(*linears, Sparse())
    with pipeline(layers) as pipe:
        mean_square(pipe(batch())).backward()
    mean_square(plain(batch())).backward()
    for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


class Renormalised(nn.Module):
    """Adds rows of a table, each of which it shortens where it reads the row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.table(x.detach().abs().sum(-1).long() % 5)
        return y


def test_a_recompute_takes_parameters_that_forwards_have_written() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Renormalised())

    def gradients(recompute: Any) -> list[Any]:
        copied = copy.deepcopy(layers)
        with pipeline(copied, recompute=recompute) as pipe:
            for _ in range(2):
                mean_square(pipe(batch())).backward()
        return [parameter.grad for parameter in copied.parameters()]

    kept = gradients(None)
    assert all(map(torch.equal, gradients("layer"), kept))
    assert all(map(torch.equal, gradients("stage"), kept))


def test_a_write_between_forward_and_backward_is_refused_for_these_too() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), Renormalised())
    with pipeline(layers, recompute="layer") as pipe:
        loss = mean_square(pipe(batch()))
        with torch.no_grad():
            next(layers.parameters()).mul_(2)
        with pytest.raises(RuntimeError, match="parameters must stay as they are"):
            loss.backward()

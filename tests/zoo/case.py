"""An animal of the zoo: a small model, what to feed it, and its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Neither a power of two nor a multiple of any number of microbatches but 1.
ROWS = 11
WIDTH = 8


@dataclass
class Case:
    """A model, and what to feed it.

    Attributes:
        model: the most stages that a schedule makes of it are eight.
        args, kwargs: arguments for `rows` rows.
        loss_fn: called with (output, target), or (output) where there is no target.
        target: for `rows` rows.
        starts: names of at least eight modules in order, the first stage's among them, where stages
            may begin; empty where pykern is to choose.
        draws: whether the model draws random numbers in training.
        ties: whether stages may share parameters.
        has_modes: whether the model lets itself be set to train or predict.
        refuses_replicas: what the refusal says where there can be no replicas.
        rows: of the batch.
    """

    model: nn.Module
    args: tuple[Any, ...]
    loss_fn: Callable[..., Tensor]
    target: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    starts: Sequence[str] = ()
    draws: bool = False
    ties: bool = False
    has_modes: bool = True
    refuses_replicas: str | None = None
    rows: int = ROWS

    def sample(self, rows: int) -> Any:
        """The first rows of the batch, as `Pipeline` takes them; None for a chain."""
        if isinstance(self.model, nn.Sequential):
            return None
        bound = signature(self.model.forward).bind(*self.args, **self.kwargs)
        first = pytree.tree_map_only(Tensor, lambda x: x[:rows], dict(bound.arguments))
        return first if self.kwargs else tuple(first.values())


def vectors(*size: int) -> Tensor:
    """A row of random numbers of this size for each sample; `WIDTH` of them without a size."""
    return torch.randn(ROWS, *(size or (WIDTH,)))


def linears(count: int, width: int = WIDTH) -> nn.ModuleList:
    """As many linear layers of one width."""
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def mean_square(output: Tensor) -> Tensor:
    """A loss without target."""
    return output.abs().square().mean()

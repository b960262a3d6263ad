"""The oracle of what stages share: the plain model whose later uses have copies of their own."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.plain_step import plain_step


class Untied:
    """A copy of a model in which no two stages have a parameter in common.

    Attributes:
        layers: the copy.
    """

    def __init__(self, model: nn.Sequential, stages: Sequence[range]) -> None:
        spans = [nn.ModuleList(model[index] for index in stage) for stage in stages]
        self.layers = nn.Sequential(*(layer for span in spans for layer in copy.deepcopy(span)))
        mine = dict(self.layers.named_parameters(remove_duplicate=False))
        # The copies of each parameter of the model, in ascending order of stages.
        self._copies: dict[Tensor, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            copies = self._copies.setdefault(parameter, [])
            if not any(mine[name] is other for other in copies):
                copies.append(mine[name])

    @property
    def num_shared(self) -> int:
        """Parameters of the model that several stages have."""
        return sum(len(copies) > 1 for copies in self._copies.values())

    def step(self, *arguments: Any, **options: Any) -> Tensor:
        """As `plain_step`; then the sum of each later stage is added to that of the first."""
        loss = plain_step(self.layers, *arguments, **options)
        for first, *others in self._copies.values():
            for other in others:
                if other.grad is not None:
                    first.grad = other.grad if first.grad is None else first.grad + other.grad
                    other.grad = None
        return loss

    def follow(self) -> None:
        """Takes over values, and what trains, from the model, and drops gradients as it did."""
        with torch.no_grad():
            for parameter, copies in self._copies.items():
                for one in copies:
                    one.copy_(parameter)
                    one.requires_grad_(parameter.requires_grad)
                if parameter.grad is None:
                    copies[0].grad = None

    def require_same(self) -> None:
        """The model's gradients agree bit for bit."""
        for parameter, (first, *_) in self._copies.items():
            if first.grad is None:
                assert parameter.grad is None
            else:
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, first.grad)

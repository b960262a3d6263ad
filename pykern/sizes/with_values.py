"""Copies of models and batches with values, for models whose forwards look at these."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..modes import random_states, set_states
from ..notes import add_note
from ..tensors.parameters import keep_gradient_dtype, with_values
from ..tensors.trees import all_tensors, map_tensors
from .without_values import as_on_gpus


class WithValues:
    """Makes such copies, as `WithoutValues` makes those without values.

    Parameters have the memory of the model's, which nothing writes to. Buffers are copied.
    """

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context that restores random numbers, and in which errors get a note."""
        states = random_states({torch.device("cpu")})
        try:
            with _C.Undo(set_states, states), as_on_gpus():
                yield
        except BaseException as error:
            add_note(error, "raised while a microbatch ran, to count bytes")
            raise

    def model(self, model: Any) -> Any:
        """A copy of a model, or of a list of layers.

        Raises:
            ValueError: the model is on "meta", or was made to train in inference mode.
        """
        layers = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        if any(each.is_meta for each in (*layers.parameters(), *layers.buffers())):
            raise ValueError(
                'with_values must be False for a model on "meta", got True. Make the model with '
                "its weights"
            )
        twins: dict[int, Tensor] = {}
        for one in layers.parameters():
            if type(one) is nn.Parameter:
                twins[id(one)] = with_values(one, one.detach())
        return copy.deepcopy(model, twins)

    def batch(self, tree: Any) -> Any:
        """The same tree of tensors.

        Raises:
            ValueError: a tensor is on "meta".
        """
        if any(each.is_meta for each in all_tensors(tree)):
            raise ValueError(
                'with_values must be False for a sample or target on "meta", got True. Give '
                "tensors with values"
            )
        return map_tensors(lambda one: one.detach().requires_grad_(one.requires_grad), tree)

    def trained(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Copies of parameters, with gradients of zeros, which an optimizer may write to."""
        copies = [nn.Parameter(one.detach().clone()) for one in parameters]
        for twin, one in zip(copies, parameters, strict=True):
            keep_gradient_dtype(twin, one)
        return copies

"""Models and batches of the same shapes, whose numbers are not there.

torch's fake tensors have the sizes, types and device of others, and no memory. Parameters and
floating point inputs become such; token ids, masks and buffers keep their values, since forwards
branch on them. A result is fake where something that it is computed from is.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.trees import map_tensors


class WithoutValues:
    """Makes such models and batches, which all belong together."""

    def __init__(self) -> None:
        from torch._subclasses import FakeTensorMode  # noqa: PLC0415 - takes long

        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it, torch does not warn of an address that is asked for, which is 0."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield

    def model(self, model: Any) -> Any:
        """A copy of a model, or of a list of layers, on the CPU; the model may be on "meta"."""
        layers = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        parameters, buffers = layers.parameters(), layers.buffers()
        # What a copy finds here it does not copy.
        twins = {id(one): nn.Parameter(self._fake(one), one.requires_grad) for one in parameters}
        return copy.deepcopy(model, twins | {id(one): _real(one) for one in buffers})

    def batch(self, tree: Any) -> Any:
        """The same tree of tensors, on the CPU."""
        return map_tensors(self._input, tree)

    def _input(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return _real(tensor)
        return self._fake(tensor).requires_grad_(tensor.requires_grad)

    def _fake(self, tensor: Tensor) -> Tensor:
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _real(tensor: Tensor) -> Tensor:
    """A copy with its values, or with zeros where it has none."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().to("cpu", copy=True)

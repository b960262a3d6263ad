"""The costs of layers, in the measures that stages can share equally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..tensors.parameters import num_bytes
from .profile import layer_bytes, layer_times_ns

# The weight of a parameter that trains, its gradient, and two moments of Adam.
_COPIES = 4


def costs_of_layers(
    balance: str, layers: list[nn.Module], parameters: list[int], sample: Any, num_stages: int
) -> list[int]:
    """The cost of every layer, as integers so that the cut is exact."""
    if balance == "time":
        return layer_times_ns(layers, sample)
    if balance == "memory":
        return bytes_held(layers, sample, num_stages)
    return parameters if balance == "parameters" else [1] * len(layers)


def bytes_held(layers: Sequence[nn.Module], sample: Any, num_stages: int) -> list[int]:
    """The bytes of each layer, with the activations of as many microbatches as stages."""
    kept = layer_bytes(layers, sample)
    return [_bytes_of(one) + num_stages * of for one, of in zip(layers, kept, strict=True)]


def _bytes_of(layer: nn.Module) -> int:
    held = sum(num_bytes(buffer) for buffer in layer.buffers())
    return held + sum(
        num_bytes(parameter) * (_COPIES if parameter.requires_grad else 1)
        for parameter in layer.parameters()
    )

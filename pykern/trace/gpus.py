"""A forward that is recorded again, once its model's stages are on GPUs of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.trees import map_tree


def shared_gpu(given: Sequence[Tensor], held: Collection[int]) -> torch.device | None:
    """The GPU for a function that is given tensors of several devices, else None.

    Args:
        given: the tensors.
        held: the identities of the model's own tensors, to which the function may write.
    """
    if len({tensor.device for tensor in given}) < 2:
        return None
    on_gpus = [tensor for tensor in given if tensor.is_cuda]
    own = [tensor for tensor in on_gpus if id(tensor) in held]
    return (own or on_gpus)[0].device if on_gpus else None


def gpu_of(module: nn.Module) -> torch.device | None:
    """The GPU of a module's parameters; None if they are elsewhere, or absent."""
    device = next((parameter.device for parameter in module.parameters()), None)
    return None if device is None or device.type == "cpu" else device


def on_gpu(gpu: torch.device | None, tree: Any) -> Any:
    """The tree with its tensors on the GPU; as it is if that is None."""
    if gpu is None:
        return tree
    return map_tree(lambda leaf: leaf.to(gpu) if isinstance(leaf, Tensor) else leaf, tree)

"""Layers that torch has spread over processes already."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..tensors.dtensor import is_dtensor

# Classes of torch.nn.parallel and torch.distributed.fsdp, by name: importing them takes long.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def refuse_distributed(model: object) -> None:
    """Raises TypeError where a module or parameter of the model, or of its layers, is distributed.

    Collectives of one process group must start in the same order in all processes. Devices that
    compute at the same time, each with microbatches of its own, start them in no common order.
    """
    for layer in model if isinstance(model, Sequence) else [model]:
        if isinstance(layer, nn.Module):
            _refuse_wrapped(layer)
            _refuse_dtensors(layer)


def _refuse_wrapped(layer: nn.Module) -> None:
    # A model has many modules, and few types of them.
    wrappers = {
        kind: base.__name__
        for kind in set(map(type, layer.modules()))
        for base in kind.__mro__
        if base.__name__ in _WRAPPERS and base.__module__.startswith("torch.")
    }
    if not wrappers:
        return
    for name, module in layer.named_modules():
        if type(module) in wrappers:
            raise TypeError(
                f"model must not have modules of {wrappers[type(module)]}, got "
                f"{name or 'the model itself'}. Give the plain model, with Pipeline(..., "
                "process_group=...) and pykern.ZeroOptimizer: devices that compute at the same "
                "time would start its collectives in another order than in other processes"
            )


def _refuse_dtensors(layer: nn.Module) -> None:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if is_dtensor(tensor):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor. Give the plain model, and "
                "tensor_parallel=(mesh['tp'], styles): two devices could reach the DTensor's "
                "process group in another order than in other processes"
            )

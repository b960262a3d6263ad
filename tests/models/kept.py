"""Counts the bytes that autograd keeps from forward to backward."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def kept_bytes(run: Callable[[], object], *, without: nn.Module) -> int:
    """Bytes of all storages that a forward saves for its backward, but for a module's parameters.

    Args:
        run: The forward.
        without: The modules whose parameters do not count.
    """
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Held, so that no other storage comes to have its address.
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result is not None
    parameters = {parameter.untyped_storage().data_ptr() for parameter in without.parameters()}
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in parameters
    )

"""The time that a GPU of a box would take for operations, by their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..boxes import BoxDevice
from ..scale.cluster import REACHED
from ..tensors.trees import all_tensors
from ..torch_private import DispatchMode

_ATEN = torch.ops.aten


class OperationTimes(DispatchMode):
    """Adds up the times of the operations that are called within it.

    An operation takes as long as its products at half of the device's rate (what `pykern.scale`
    assumes), or as its tensors at the rate of its memory, whichever is longer. The host's own time
    is left out.

    Args:
        device: the GPU.
        num_lanes: the number of devices of the plan among which its rates are shared.

    Attributes:
        ns: the sum.
    """

    def __init__(self, device: BoxDevice, num_lanes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ns = 0.0
        assert device.flops_per_ns is not None
        assert device.memory_bytes_per_ns is not None
        self._flops_per_ns = REACHED * device.flops_per_ns / num_lanes
        self._bytes_per_ns = device.memory_bytes_per_ns / num_lanes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the operation."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = {id(tensor): tensor.nbytes for tensor in all_tensors((args, kwargs, result))}
            in_memory_ns = sum(moved.values()) / self._bytes_per_ns
            self.ns += max(in_memory_ns, flops_of(func, args, kwargs, result) / self._flops_per_ns)
        return result


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The operations of floating point in a product or an attention; 0 for all else."""
    name = func._overloadpacket
    shapes = [each.shape for each in args if isinstance(each, Tensor)]
    # torch's own table has the attention of GPUs alone.
    if name is _ATEN._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*shapes[:3]))
    if name is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*shapes[:4]))
    count = flop_registry.get(name)
    return 0 if count is None else int(count(*args, **(kwargs or {}), out_val=result))

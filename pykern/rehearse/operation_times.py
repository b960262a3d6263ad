"""The time that a GPU of a box would take for operations, by their sizes."""

from __future__ import annotations

from typing import Any

from ..boxes import BoxDevice
from ..scale.cluster import REACHED
from ..tensors.flops import flops_of
from ..tensors.sparse import all_bytes
from ..tensors.trees import all_tensors
from ..torch_private import DispatchMode, call_in_mode


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
        result = self.in_parts(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
        result = call_in_mode(func, args, kwargs or {})
        if not func.is_view:
            tensors = all_tensors((args, kwargs, result))
            moved = {id(tensor): all_bytes(tensor) for tensor in tensors}
            in_memory_ns = sum(moved.values()) / self._bytes_per_ns
            self.ns += max(in_memory_ns, flops_of(func, args, kwargs, result) / self._flops_per_ns)
        return result

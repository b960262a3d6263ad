"""Operations of floating point, counted by the sizes of products and attentions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..torch_private import DispatchMode, call_in_mode

_ATEN = torch.ops.aten


class CountedFlops(DispatchMode):
    """Counts the operations of products and attentions that are called within it.

    Attributes:
        total: the sum.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the operation."""
        result = self.in_parts(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
        result = call_in_mode(func, args, kwargs or {})
        self.total += flops_of(func, args, kwargs, result)
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

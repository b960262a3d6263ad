"""A look for values that are NaN or infinite."""

from __future__ import annotations

import math

from torch import Tensor

from .dtensor import local


def require_finite(tensor: Tensor, what: str, where: str, *, may_mask: bool = False) -> None:
    """Raises FloatingPointError where a value of the tensor is not finite.

    Args:
        tensor: any, of a DTensor this process's part; on a GPU this waits for it.
        what: the tensor's name.
        where: the stage and the microbatch.
        may_mask: whether -inf is right, as masks of attention have it.
    """
    values = local(tensor)
    if values.is_sparse:
        values = values.coalesce().values()
    wrong = values.numel() - int(values.isfinite().sum())
    if wrong > 0 and may_mask:
        wrong -= int((values == -math.inf).sum())
    if wrong > 0:
        raise FloatingPointError(
            f"{what} has {wrong} of {values.numel()} values that are NaN or infinite ({where}; "
            f"{str(values.dtype).removeprefix('torch.')} of shape {tuple(values.shape)})"
        )

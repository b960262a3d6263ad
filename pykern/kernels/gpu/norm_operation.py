"""RMSNorm and LayerNorm on GPUs: the launchers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dropout import threshold
from . import norm_backward, norm_forward
from .blocks import cdiv, next_power_of_2
from .random import place_of
from .rows import as_rows

# Elements of a program's tile, 16 for each thread, unless one row has more.
_ELEMENTS = 2048
# The most columns of a tile of the forward and of the backward. Longer rows are read twice.
_MOST_COLUMNS = 16384
_MOST_BACKWARD = 8192
# The most programs of a backward. Each adds up the gradients of weights over its rows. A constant,
# not the GPU's number of processors, gives the same results on every GPU.
_MOST_PARTS = 256
# The tile of parts that one program adds up at a time.
_PARTS, _COLUMNS = 64, 32


def add_and_normalise(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
    rate: float,
    seed: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `pykern.kernels.norm_operation.add_and_normalise`."""
    added = _empty(x.shape if delta is not None else (0,), x.dtype, x)
    normed = _empty(x.shape, dtype, x)
    rstd = _empty((*x.shape[:-1], 1), torch.float32, x)
    mean = _empty(rstd.shape if centred else (0,), torch.float32, x)
    if normed.numel() == 0:
        return added, normed, rstd, mean
    num_columns = x.shape[-1]
    num_rows = x.numel() // num_columns
    rows, columns, num_warps = _tile(num_columns, _MOST_COLUMNS)
    whole = columns >= num_columns
    drops = (seed, place_of(place, x.device))
    sizes = (1 / (1 - rate), threshold(rate))
    fixed = {"CENTRED": centred, "DROPS": rate > 0, "COLUMNS": columns, "num_warps": num_warps}
    terms, strides = _rows(x, delta)
    if not whole:
        norm_forward.statistics[num_rows,](
            *terms, added, *drops, num_columns, *strides, *sizes, rstd, mean, eps, **fixed
        )
        if delta is not None:
            terms, strides = _rows(added, None)
    norm_forward.forward[cdiv(num_rows, rows), cdiv(num_columns, columns)](
        *terms,
        added,
        *drops,
        num_rows,
        num_columns,
        *strides,
        *sizes,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        normed,
        rstd,
        mean,
        eps,
        WHOLE=whole,
        ROWS=rows,
        **fixed,
    )
    return added, normed, rstd, mean


def gradients(
    gradient: Tensor,
    residual: Tensor | None,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    eps: float,
    centred: bool,
    again: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pykern.kernels.norm_operation.gradients`."""
    del eps
    of_total = _empty(total.shape, total.dtype, total)
    normed = _empty(total.shape if again else (0,), gradient.dtype, total)
    num_weights = 1 if bias is None else 2
    of_weights = _empty((num_weights, total.shape[-1]), torch.float32, total)
    if of_total.numel() == 0:
        return of_total, normed, of_weights.zero_()
    num_columns = total.shape[-1]
    num_rows = total.numel() // num_columns
    rows, columns, num_warps = _backward_tile(num_columns)
    num_tiles = cdiv(num_rows, rows)
    tiles_each = cdiv(num_tiles, _MOST_PARTS)
    num_parts = cdiv(num_tiles, tiles_each)
    parts = _empty((num_weights, num_parts, num_columns), torch.float32, total)
    (coming, more, matrix), strides = _rows(gradient, residual, total)
    weight = weight.contiguous()
    fixed = {"CENTRED": centred, "COLUMNS": columns, "num_warps": num_warps}
    sums = None
    if columns < num_columns:
        sums = _empty((num_rows, 2), torch.float32, total)
        norm_backward.sums[num_rows,](
            coming, matrix, weight, rstd, mean, sums, num_columns, strides[0], strides[2], **fixed
        )
    norm_backward.backward[num_parts, cdiv(num_columns, columns)](
        coming,
        more,
        matrix,
        weight,
        None if bias is None else bias.contiguous(),
        rstd,
        mean,
        sums,
        of_total,
        normed,
        parts,
        num_rows,
        num_columns,
        tiles_each,
        *strides,
        AGAIN=again,
        ROWS=rows,
        **fixed,
    )
    norm_backward.add_parts[cdiv(num_columns, _COLUMNS), num_weights](
        parts, of_weights, num_parts, num_columns, PARTS=_PARTS, COLUMNS=_COLUMNS, num_warps=4
    )
    return of_total, normed, of_weights


def _tile(num_columns: int, most: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    columns = min(max(next_power_of_2(num_columns), 4), most)
    rows = max(_ELEMENTS // columns, 1)
    return rows, columns, max(rows * columns // 512, 1)


def _backward_tile(num_columns: int) -> tuple[int, int, int]:
    rows, columns, num_warps = _tile(num_columns, _MOST_BACKWARD)
    # Loaded one by one, elements take registers for their addresses.
    return rows, columns, num_warps if num_columns % 16 == 0 else min(2 * num_warps, 32)


def _rows(*tensors: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
    """Tensors as matrices, and the strides of their rows."""
    matrices = [None if x is None else as_rows(x) for x in tensors]
    return matrices, [0 if x is None else x.stride(0) for x in matrices]


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)

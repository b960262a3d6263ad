"""RMSNorm and LayerNorm on GPUs: the launchers."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..dropout import threshold
from . import norm_backward, norm_forward
from .random import place_of
from .rows import as_rows

# Elements of a program's tile, 16 for each thread, unless one row has more.
_ELEMENTS = 2048
# The most columns of a program's tile. Longer rows are read twice.
_MOST_COLUMNS = 8192
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
    rows, columns, num_warps = _tile(num_columns)
    whole = columns >= num_columns
    terms = _rows(x=x, delta=delta)
    shared = {
        "added": added,
        "seed": seed,
        "place": place_of(place, x.device),
        "num_columns": num_columns,
        "scale": 1 / (1 - rate),
        "threshold": threshold(rate),
        "rstd": rstd,
        "mean": mean,
        "eps": eps,
        "CENTRED": centred,
        "DROPS": rate > 0,
        "COLUMNS": columns,
        "num_warps": num_warps,
    }
    if not whole:
        norm_forward.statistics[num_rows,](**terms, **shared)
        if delta is not None:
            terms = _rows(x=added, delta=None)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
    norm_forward.forward[grid](
        **terms,
        **shared,
        num_rows=num_rows,
        weight=weight.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        normed=normed,
        WHOLE=whole,
        ROWS=rows,
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
    rows, columns, num_warps = _tile(num_columns)
    num_tiles = triton.cdiv(num_rows, rows)
    tiles_each = triton.cdiv(num_tiles, _MOST_PARTS)
    num_parts = triton.cdiv(num_tiles, tiles_each)
    parts = _empty((num_weights, num_parts, num_columns), torch.float32, total)
    shared = _rows(gradient=gradient, total=total) | {
        "weight": weight.contiguous(),
        "rstd": rstd,
        "mean": mean,
        "num_columns": num_columns,
        "CENTRED": centred,
        "COLUMNS": columns,
        "num_warps": num_warps,
    }
    sums = None
    if columns < num_columns:
        sums = _empty((num_rows, 2), torch.float32, total)
        norm_backward.sums[num_rows,](**shared, result=sums)
    norm_backward.backward[num_parts, triton.cdiv(num_columns, columns)](
        **shared,
        **_rows(residual=residual),
        bias=None if bias is None else bias.contiguous(),
        sums=sums,
        of_total=of_total,
        normed=normed,
        parts=parts,
        num_rows=num_rows,
        tiles_each=tiles_each,
        AGAIN=again,
        ROWS=rows,
    )
    norm_backward.add_parts[triton.cdiv(num_columns, _COLUMNS), num_weights](
        parts, of_weights, num_parts, num_columns, PARTS=_PARTS, COLUMNS=_COLUMNS, num_warps=4
    )
    return of_total, normed, of_weights


def _tile(num_columns: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    columns = min(max(triton.next_power_of_2(num_columns), 4), _MOST_COLUMNS)
    rows = max(_ELEMENTS // columns, 1)
    return rows, columns, max(rows * columns // 512, 1)


def _rows(**tensors: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel: tensors as matrices, and the strides of their rows."""
    matrices = {name: None if x is None else as_rows(x) for name, x in tensors.items()}
    strides = {f"{name}_stride": 0 if x is None else x.stride(0) for name, x in matrices.items()}
    return matrices | strides


def _empty(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)

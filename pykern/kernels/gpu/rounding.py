"""Rounding to the dtypes of tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# The interpreter truncates bits, but a GPU rounds to nearest.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """A float32 block in another type, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        # NaN stays NaN, whatever its rounded bits would be.
        up = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, up)
        return (up >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)

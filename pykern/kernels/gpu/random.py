"""The random words of `pykern.kernels.philox`, block by block."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def seed_of(value, place, IN_MEMORY: tl.constexpr):
    """The seed of a launch: given with it, or what is in memory when it runs."""
    if IN_MEMORY:
        return tl.load(place)
    return value.to(tl.int64)


@triton.jit
def random_words(seed, rows, quads, NUM_QUADS: tl.constexpr):
    """The words of some rows and of four columns for each quad.

    Args:
        seed: int64.
        rows: int64 [R, 1].
        quads: int32 [1, NUM_QUADS], columns divided by four, one after another.
        NUM_QUADS: how many.

    Returns:
        uint32 [R, 4 * NUM_QUADS].
    """
    first = quads.to(tl.uint32) + (rows * 0).to(tl.uint32)
    second = (rows & 0xFFFFFFFF).to(tl.uint32) + first * 0
    third = (rows >> 32).to(tl.uint32) + first * 0
    a, b, c, d = tl.philox(seed, first, second, third, first * 0, n_rounds=7)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], 4 * NUM_QUADS)

"""The random words of `pykern.kernels.philox`, block by block."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def seed_of(value, place):
    """The seed of a launch: loaded from memory when it runs, or `value` without a place."""
    return tl.load(place, place.to(tl.int64) != 0, value.to(tl.int64))


@triton.jit
def random_words(seed, rows, quads, NUM_QUADS: tl.constexpr):
    """The words of some rows and of four columns for each quad.

    Args:
        seed: int64.
        rows: int64 [R, 1].
        quads: int32 [1, NUM_QUADS], columns divided by four, one after another.
        NUM_QUADS: number of quads.

    Returns:
        uint32 [R, 4 * NUM_QUADS].
    """
    first = quads.to(tl.uint32) + (rows * 0).to(tl.uint32)
    second = (rows & 0xFFFFFFFF).to(tl.uint32) + first * 0
    third = (rows >> 32).to(tl.uint32) + first * 0
    a, b, c, d = tl.philox(seed, first, second, third, first * 0, n_rounds=7)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(rows.shape[0], 4 * NUM_QUADS)


def place_of(seed: Tensor | None, device: torch.device) -> Tensor:
    """The place of a seed. Seeds with and without a place share one kernel.

    A second kernel could not be loaded during a capture. For the same reason, kernels have seeds
    and places in `do_not_specialize`.
    """
    return _nowhere(device) if seed is None else seed


@cache
def _nowhere(device: torch.device) -> Tensor:
    # A tensor without elements has address 0.
    return torch.zeros(0, dtype=torch.int64, device=device)

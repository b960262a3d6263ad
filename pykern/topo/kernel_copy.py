"""Copies that a GPU's processors make, in the place of its copy engines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of 32 bits that a program copies: 16 for each of its threads.
_BLOCK = 2048


@triton.jit
def _copy(into, source, count, BLOCK: tl.constexpr):
    # More than 2^31 numbers have 64-bit places.
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(into + places, tl.load(source + places, inside), inside)


def kernel_copy(into: Tensor, source: Tensor) -> None:
    """Copies bytes by a kernel on the current stream, whose GPU must reach both tensors.

    Args:
        into: uint8 [bytes], contiguous; a multiple of 4 bytes.
        source: uint8 [bytes], likewise.
    """
    numbers = source.view(torch.int32)
    grid = (triton.cdiv(numbers.numel(), _BLOCK),)
    _copy[grid](into.view(torch.int32), numbers, numbers.numel(), BLOCK=_BLOCK)

"""Saved tensors in 8 bits: a code per element, and a scale per 128 elements of a row.

The scale is float32, so an element takes 1.03 bytes in all: a float16 scale would save 0.016 bytes,
but does not cover the range of bfloat16. NaN and infinities stay visible: if a block has any, the
whole block is restored as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from . import levels
from .operation import define

StashForm = Literal["int8", "e4m3"]
FORMS: tuple[StashForm, ...] = get_args(StashForm)
# By form: the dtype of its codes, and the largest code that is used.
CODES: dict[StashForm, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "e4m3": (torch.float8_e4m3fn, 448.0),
}
# Columns of a block.
BLOCK = 128
# A block whose elements are all smaller becomes zeros: its inverse scale could overflow.
SMALLEST = 2.0**-100


def quantised(x: Tensor, form: StashForm) -> tuple[Tensor, Tensor]:
    """The operation in plain torch.

    Args:
        x: floating, of any shape; values beyond float32 count as infinite.
        form: of the codes.

    Returns:
        The codes, of the shape of `x`. Scales, float32 [..., columns / 128 rounded up], which are
        NaN for blocks with NaN or infinities. Both are contiguous.
    """
    dtype, largest = CODES[form]
    blocks = _blocks(x.float())
    # NaN or infinity in a block makes the maximum of the block not finite.
    magnitude = blocks.abs().amax(-1, keepdim=True)
    whole = torch.isfinite(magnitude)
    used = whole & (magnitude >= SMALLEST)
    # No code exceeds the largest: the rounding of this product is less than half a step.
    codes = (blocks * torch.where(used, largest / magnitude, 0.0)).nan_to_num_(0.0)
    if form == "int8":
        codes = codes.round_()
    scales = torch.where(used, magnitude / largest, 0.0)
    scales = torch.where(whole, scales, float("nan"))
    return codes.flatten(-2)[..., : x.shape[-1]].to(dtype).contiguous(), scales.squeeze(-1)


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times scales in float32, rounded to a type; contiguous."""
    values = _blocks(codes.float()) * scales[..., None]
    return values.flatten(-2)[..., : codes.shape[-1]].to(dtype).contiguous()


def _blocks(values: Tensor) -> Tensor:
    """[..., columns] -> [..., blocks, 128], with zeros behind the last column."""
    num_missing = -values.shape[-1] % BLOCK
    padded = F.pad(values, (0, num_missing)) if num_missing else values
    blocks: Tensor = padded.unflatten(-1, (-1, BLOCK))
    return blocks


_quantise = define("quantise(Tensor x, str form) -> (Tensor, Tensor)", quantised)
_restore = define("restore(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor", restored)


def quantise(x: Tensor, form: StashForm = "int8") -> tuple[Tensor, Tensor]:
    """Quantises a tensor to 8 bits, for `restore`. No gradient goes through.

    For int8, the error of an element is at most half a step: 1/254 of the largest magnitude of its
    block of 128. For e4m3, a float with 3 bits of mantissa, the error is at most 1/16 of the
    element. int8 is more accurate if a block's elements have similar magnitudes, e4m3 if few
    elements are much larger than the rest.

    Args:
        x: float32, bfloat16, float16 or float64, [..., columns].
        form: "int8" or "e4m3", which GPUs make from compute capability 8.9 on.

    Returns:
        Codes, int8 or float8_e4m3fn, of the shape of `x`. Scales, float32, one per 128 columns.

    Raises:
        ValueError: the form is unknown, or `x` has no columns.
        TypeError: `x` is not floating.
        NotImplementedError: the GPU cannot round to e4m3, or Triton's interpreter is to, which
            rounds it wrong.

    Paper: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x must have columns to quantise, got shape {list(x.shape)}")
    return _quantise(x.detach(), form)  # type: ignore[no-any-return]


def restore(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Restores approximately the tensor that was given to `quantise`.

    Args:
        codes: as returned by `quantise`.
        scales: as returned by `quantise`.
        dtype: of the result.

    Returns:
        The tensor, in the shape of the codes.
    """
    return _restore(codes, scales, dtype)  # type: ignore[no-any-return]


def level() -> levels.KernelLevel:
    """The level of the operation called now; without grad mode, no tensor is quantised."""
    return levels.level() if torch.is_grad_enabled() else "ops"


def packed(x: Tensor, level: levels.KernelLevel) -> tuple[Tensor, ...]:
    """The tensors to save for the input of an activation."""
    return quantise(x) if level == "ops+stash" else (x,)


def unpacked(saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The input of an activation, from its saved tensors."""
    return restore(saved[0], saved[1], dtype) if len(saved) == 2 else saved[0]

"""Tensors kept in 8 bits until a backward needs them: a code per element, a scale per 128 of a row.

The scale is float32, 1.03 bytes per element in all: a float16 would save 0.016 bytes, but the range
of bfloat16 does not fit into it. What is not finite stays visible: all of its block comes back NaN.
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
# Of each form: the type of its codes, and the largest that is used.
CODES: dict[StashForm, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "e4m3": (torch.float8_e4m3fn, 448.0),
}
# Columns of a block.
BLOCK = 128
# A block whose elements are all smaller is one of zeros: the inverse of its scale could overflow.
SMALLEST = 2.0**-100


def quantised(x: Tensor, form: StashForm) -> tuple[Tensor, Tensor]:
    """The operation in plain torch.

    Args:
        x: floating, of any shape; what float32 cannot hold counts as infinite.
        form: of the codes.

    Returns:
        The codes, of the shape of `x`. Scales, float32 [..., columns / 128 rounded up]: NaN where
        a block holds what is not finite. Both contiguous.
    """
    dtype, largest = CODES[form]
    blocks = _blocks(x.float())
    # What is not finite makes the largest of its block so.
    magnitude = blocks.abs().amax(-1, keepdim=True)
    whole = torch.isfinite(magnitude)
    used = whole & (magnitude >= SMALLEST)
    # No code is beyond the largest: what is rounded in this product is less than half a step.
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
    """[..., columns] -> [..., blocks, 128], zeros behind the last column."""
    num_missing = -values.shape[-1] % BLOCK
    padded = F.pad(values, (0, num_missing)) if num_missing else values
    blocks: Tensor = padded.unflatten(-1, (-1, BLOCK))
    return blocks


_quantise = define("quantise(Tensor x, str form) -> (Tensor, Tensor)", quantised, "stash:quantised")
_restore = define(
    "restore(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor", restored, "stash:restored"
)


def quantise(x: Tensor, form: StashForm = "int8") -> tuple[Tensor, Tensor]:
    """A tensor in 8 bits, for `restore`. No gradient goes through it.

    The error of an element is at most half a step, 1/254 of the largest magnitude of its 128
    neighbours, for int8; for e4m3, a float of 3 bits of mantissa, 1/16 of the element. int8 is
    nearer where a block's elements are of one size, e4m3 where few are much larger than the rest.

    Args:
        x: float32, bfloat16, float16 or float64, [..., columns].
        form: "int8" or "e4m3", which Triton's interpreter rounds wrong and refuses.

    Returns:
        Codes, int8 or float8_e4m3fn, of the shape of `x`. Scales, float32, one per 128 columns.

    Raises:
        ValueError: there is no such form, or `x` has no columns.
        TypeError: `x` is not floating.

    Paper: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
    """
    if form not in FORMS:
        raise ValueError(f"a form of 8 bits is one of {', '.join(FORMS)}, got {form!r}")
    if not x.is_floating_point():
        raise TypeError(f"what is quantised are floating numbers, got {x.dtype}")
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"a tensor of shape {list(x.shape)} has no columns to quantise")
    return _quantise(x.detach(), form)  # type: ignore[no-any-return]


def restore(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantise` was given, nearly.

    Args:
        codes: as returned by `quantise`.
        scales: as returned by `quantise`.
        dtype: of the result.

    Returns:
        Of the shape of the codes.
    """
    return _restore(codes, scales, dtype)  # type: ignore[no-any-return]


def level() -> levels.KernelLevel:
    """The level of the operation called now; nothing is quantised where no backward follows."""
    return levels.level() if torch.is_grad_enabled() else "ops"


def packed(x: Tensor, level: levels.KernelLevel) -> tuple[Tensor, ...]:
    """What is saved of the input of an activation."""
    return quantise(x) if level == "ops+stash" else (x,)


def unpacked(saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The input of an activation from what was saved of it."""
    return restore(saved[0], saved[1], dtype) if len(saved) == 2 else saved[0]

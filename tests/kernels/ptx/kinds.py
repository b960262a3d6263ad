"""The types of PTX: how the bits of registers become numbers, and numbers bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]
RAW: dict[int, Any] = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Kind(NamedTuple):
    """A type.

    Attributes:
        width: bytes, or 0 for predicates.
        decode: from unsigned numbers of that width. Packed values get a second dimension.
        encode: the inverse, rounded to nearest; of signed types, signed numbers.
    """

    width: int
    decode: Callable[[Numbers], Numbers]
    encode: Callable[[Numbers], Numbers]


def bfloat16_bits(values: Numbers) -> Numbers:
    """The bits of float32 values, rounded to nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    up = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    up = np.where(np.isnan(values), np.uint32(0x7FFF0000), up)
    return (up >> np.uint32(16)).astype(np.uint16)


def _from_bfloat16(raw: Numbers) -> Numbers:
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _e4m3_bits(values: Numbers) -> Numbers:
    """The bits of float32 values; those beyond the largest become the largest."""
    clipped = torch.from_numpy(np.clip(values, -448, 448).astype(np.float32))
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _from_e4m3(raw: Numbers) -> Numbers:
    numbers = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn)
    return numbers.float().numpy()


def _parts(raw: Numbers, part: Any) -> Numbers:
    """[n] as [n, 2], the lower half first."""
    return np.ascontiguousarray(raw).view(part).reshape(-1, 2)


def _whole(parts: Numbers, whole: Any) -> Numbers:
    return np.ascontiguousarray(parts).view(whole).reshape(-1)


def _plain(dtype: Any) -> Kind:
    dtype = np.dtype(dtype)
    return Kind(
        dtype.itemsize,
        lambda raw: np.ascontiguousarray(raw).view(dtype),
        lambda values: np.ascontiguousarray(values.astype(dtype)).view(
            RAW[dtype.itemsize] if dtype.kind == "f" else dtype
        ),
    )


def _integers() -> dict[str, Kind]:
    return {
        letter + str(8 * width): _plain(kind + str(width))
        for letter, kind in (("u", "u"), ("b", "u"), ("s", "i"))
        for width in (1, 2, 4, 8)
    }


_U16, _U32, _U8 = np.uint16, np.uint32, np.uint8
KINDS: dict[str, Kind] = {
    **_integers(),
    "pred": Kind(0, lambda raw: raw, lambda values: values.astype(np.bool_)),
    "f32": _plain(np.float32),
    "bf16": Kind(2, _from_bfloat16, bfloat16_bits),
    "f16": Kind(
        2,
        lambda raw: np.ascontiguousarray(raw).view(np.float16).astype(np.float32),
        lambda values: values.astype(np.float16).view(_U16),
    ),
    "f32x2": Kind(
        8,
        lambda raw: _parts(raw, np.float32),
        lambda values: _whole(values.astype(np.float32), np.uint64),
    ),
    "bf16x2": Kind(
        4,
        lambda raw: _from_bfloat16(_parts(raw, _U16)),
        lambda values: _whole(bfloat16_bits(values), _U32),
    ),
    "f16x2": Kind(
        4,
        lambda raw: _parts(raw, np.float16).astype(np.float32),
        lambda values: _whole(values.astype(np.float16), _U32),
    ),
    "e4m3x2": Kind(
        2,
        lambda raw: _from_e4m3(_parts(raw, _U8)),
        lambda values: _whole(_e4m3_bits(values), _U16),
    ),
}


def immediate(text: str, kind: Kind) -> Numbers:
    """The raw bits of a number in the text, as an array of one."""
    floating = text.startswith(("0f", "0d"))
    bits = int(text[2:], 16) if floating else int(text.rstrip("U"), 0)
    if not kind.width:
        return np.array([bits != 0])
    return np.array([bits % (1 << (8 * kind.width))], RAW[kind.width])

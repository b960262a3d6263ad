"""Instructions whose results depend on the operands of the same thread alone.

Approximate instructions are computed in float64, rounded, and moved by up to two float32 ulps,
which is about what a GPU may be off by. The move depends on the bits of the result, so equal
operands give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.ptx.kinds import Numbers

_F32, _F64 = np.float32, np.float64


class Pure(NamedTuple):
    """Kinds of results and operands, and the function."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    function: Callable[..., Any]


def moved(exact: Numbers) -> Numbers:
    """An approximation of a float64: rounded, and up to two ulps away."""
    near = exact.astype(_F32)
    bits = near.view(np.int32)
    away = (bits.astype(np.uint32) * np.uint32(2654435761) >> np.uint32(16)) % np.uint32(5)
    usual = np.isfinite(near) & (np.abs(near) > 1e-37) & (np.abs(near) < 1e38)
    # Powers of two are exact on GPUs, and the weights of softmax with one class depend on it.
    usual &= (bits & 0x7FFFFF) != 0
    return np.where(usual, bits + away.astype(np.int32) - 2, bits).view(_F32)


def flushed(x: Numbers) -> Numbers:
    """Without numbers below the smallest normal one."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(_F32(0), x), x)


def _fma_odd(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """In float64, rounded to odd: whoever rounds the result to fewer bits rounds it rightly."""
    product, c = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    total = product + c
    behind = total - product
    lost = (product - (total - behind)) + (c - behind)
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(_F64)


def _fma_f32(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    return _fma_odd(a, b, c).astype(_F32)


def _fma_down(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """Rounded toward minus infinity."""
    exact = _fma_odd(a, b, c)
    near = exact.astype(_F32)
    return np.where(near > exact, np.nextafter(near, _F32(-np.inf)), near)


def odd_f32(x: Numbers) -> Numbers:
    """A float64 in float32, rounded to odd, for values that are stored in 16 bits."""
    near = x.astype(_F32)
    bits = np.ascontiguousarray(near).view(np.int32)
    inexact = (near.astype(_F64) != x) & np.isfinite(near)
    # The neighbour toward zero has a smaller magnitude, whose bits are smaller by one.
    truncated = np.where(np.abs(near.astype(_F64)) > np.abs(x), bits - 1, bits)
    return np.where(inexact, truncated | 1, bits).astype(np.int32).view(_F32)


def _rounded_once(function: Callable[..., Numbers]) -> Callable[..., Numbers]:
    """A function of values of 16 bits, whose result is rounded once to 16 bits."""
    return lambda *given: odd_f32(function(*(x.astype(_F64) for x in given)))


def _high(a: Numbers, b: Numbers) -> Numbers:
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide)) >> wide(32)


def _high_u64(a: Numbers, b: Numbers) -> Numbers:
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    # Neither sum overflows: it is at most (2**32 - 1)**2 + 2 * (2**32 - 1).
    right = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    left = (a & low) * (b >> half) + (right & low)
    return (a >> half) * (b >> half) + (right >> half) + (left >> half)


def _wide(dtype: Any, a: Numbers, b: Numbers, c: Numbers | int = 0) -> Numbers:
    return a.astype(dtype) * b.astype(dtype) + np.asarray(c, dtype)


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    """Truncated. Threads that are not asked may divide by zero."""
    b = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(b) if a.dtype.kind == "i" else a // b
    return np.where((a < 0) != (b < 0), -quotient, quotient) if a.dtype.kind == "i" else quotient


def _remainder(a: Numbers, b: Numbers) -> Numbers:
    """With the sign of the first, as the quotient is truncated."""
    return a - _quotient(a, b) * b


def _left(bits: int, a: Numbers, by: Numbers) -> Numbers:
    return np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), 0)


def _right(bits: int, a: Numbers, by: Numbers) -> Numbers:
    shifted = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, 0)


def _field(signed: bool, a: Numbers, start: Numbers, length: Numbers) -> Numbers:
    start, length = start.astype(np.int64) & 0xFF, length.astype(np.int64) & 0xFF
    value = (a.astype(np.int64) >> np.minimum(start, 63)) & ((np.int64(1) << length) - 1)
    sign = np.int64(1) << np.maximum(length - 1, 0)
    return np.where(value & sign != 0, value - 2 * sign, value) if signed else value


def _permuted(a: Numbers, b: Numbers, choice: Numbers) -> Numbers:
    a, b, choice = np.broadcast_arrays(a, b, choice)
    pool = np.stack([a, b], 1).astype(np.uint32).view(np.uint8)
    fields = (choice[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 0xF
    chosen = np.take_along_axis(pool, (fields & 7).astype(np.int64), 1)
    signs = np.where(chosen & 0x80, 0xFF, 0).astype(np.uint8)
    picked = np.ascontiguousarray(np.where(fields & 8, signs, chosen))
    return picked.view(np.uint32).reshape(-1)


def _floats(table: dict[str, Pure], kind: str, *, packed: bool = False) -> None:
    one = (kind,)
    for rounding in ("", ".rn"):
        table[f"add{rounding}.{kind}"] = Pure(one, one * 2, np.add)
        table[f"sub{rounding}.{kind}"] = Pure(one, one * 2, np.subtract)
        table[f"mul{rounding}.{kind}"] = Pure(one, one * 2, np.multiply)
    table[f"fma.rn.{kind}"] = Pure(one, one * 3, _fma_f32)
    if not packed:
        table[f"neg.{kind}"] = Pure(one, one, np.negative)
        table[f"abs.{kind}"] = Pure(one, one, np.abs)
        # A number beside a NaN is the result.
        table[f"max.{kind}"] = Pure(one, one * 2, np.fmax)
        table[f"min.{kind}"] = Pure(one, one * 2, np.fmin)
        table[f"div.rn.{kind}"] = Pure(one, one * 2, np.divide)


def _sixteen(table: dict[str, Pure], kind: str) -> None:
    one = (kind,)
    for rounding in ("", ".rn"):
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
            table[f"{name}{rounding}.{kind}"] = Pure(one, one * 2, _rounded_once(function))
    table[f"fma.rn.{kind}"] = Pure(one, one * 3, _rounded_once(_fma_odd))
    table[f"neg.{kind}"] = Pure(one, one, np.negative)


def _single(table: dict[str, Pure]) -> None:
    f32 = ("f32",)
    one: dict[str, Callable[[Numbers], Numbers]] = {
        "ex2.approx": np.exp2,
        "lg2.approx": np.log2,
        "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    }
    for name, function in one.items():
        table[f"{name}.f32"] = Pure(f32, f32, lambda x, f=function: moved(f(x.astype(_F64))))
        table[f"{name}.ftz.f32"] = Pure(
            f32, f32, lambda x, f=function: flushed(moved(f(flushed(x).astype(_F64))))
        )
    # Three operands and a result, since sm_100.
    table["max.f32/4"] = Pure(f32, f32 * 3, lambda a, b, c: np.fmax(np.fmax(a, b), c))
    table["min.f32/4"] = Pure(f32, f32 * 3, lambda a, b, c: np.fmin(np.fmin(a, b), c))
    table["div.full.f32"] = Pure(f32, f32 * 2, lambda a, b: moved(a.astype(_F64) / b.astype(_F64)))
    table["abs.ftz.f32"] = Pure(f32, f32, lambda x: flushed(np.abs(x)))
    table["fma.rn.ftz.f32"] = Pure(
        f32, f32 * 3, lambda *given: flushed(_fma_f32(*map(flushed, given)))
    )
    table["fma.rm.ftz.f32"] = Pure(
        f32, f32 * 3, lambda *given: flushed(_fma_down(*map(flushed, given)))
    )
    for low in ("bf16", "f16"):
        table[f"add.rn.f32.{low}"] = Pure(f32, (low, "f32"), np.add)
        table[f"sub.rn.f32.{low}"] = Pure(f32, (low, "f32"), np.subtract)
        table[f"fma.rn.f32.{low}"] = Pure(f32, (low, low, "f32"), _fma_f32)


def _whole_numbers(table: dict[str, Pure], bits: int) -> None:
    for letter in "su":
        kind = f"{letter}{bits}"
        two = ((kind,), (kind, kind))
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul.lo", np.multiply)):
            table[f"{name}.{kind}"] = Pure(*two, function)
        table[f"min.{kind}"] = Pure(*two, np.minimum)
        table[f"max.{kind}"] = Pure(*two, np.maximum)
        table[f"div.{kind}"] = Pure(*two, _quotient)
        table[f"rem.{kind}"] = Pure(*two, _remainder)
        table[f"mad.lo.{kind}"] = Pure((kind,), (kind,) * 3, lambda a, b, c: a * b + c)
        table[f"shr.{kind}"] = Pure((kind,), (kind, "u32"), partial(_right, bits))
        if bits == 32:
            wide, dtype = f"{letter}64", np.dtype(f"{'i' if letter == 's' else 'u'}8")
            table[f"mul.wide.{kind}"] = Pure((wide,), (kind, kind), partial(_wide, dtype))
            table[f"mad.wide.{kind}"] = Pure((wide,), (kind, kind, wide), partial(_wide, dtype))
    table[f"neg.s{bits}"] = Pure((f"s{bits}",), (f"s{bits}",), np.negative)


def _bits(table: dict[str, Pure]) -> None:
    for kind, bits in (("b16", 16), ("b32", 32), ("b64", 64), ("pred", 1)):
        for name, function in (
            ("and", np.bitwise_and),
            ("or", np.bitwise_or),
            ("xor", np.bitwise_xor),
        ):
            table[f"{name}.{kind}"] = Pure((kind,), (kind, kind), function)
        table[f"not.{kind}"] = Pure((kind,), (kind,), np.invert)
        table[f"shl.{kind}"] = Pure((kind,), (kind, "u32"), partial(_left, bits))
    del table["shl.pred"]
    table["bfe.u32"] = Pure(("u32",), ("u32",) * 3, partial(_field, False))
    table["bfe.s32"] = Pure(("s32",), ("s32", "u32", "u32"), partial(_field, True))
    table["popc.b32"] = Pure(("u32",), ("u32",), np.bitwise_count)
    table["prmt.b32"] = Pure(("b32",), ("b32",) * 3, _permuted)
    for kind in ("s32", "u32"):
        table[f"mul.hi.{kind}"] = Pure((kind,), (kind, kind), _high)
    table["mul.hi.u64"] = Pure(("u64",), ("u64", "u64"), _high_u64)


def pure() -> dict[str, Pure]:
    """All instructions by their whole opcode."""
    table: dict[str, Pure] = {}
    _floats(table, "f32")
    _floats(table, "f32x2", packed=True)
    for kind in ("bf16", "bf16x2", "f16", "f16x2"):
        _sixteen(table, kind)
    _single(table)
    for bits in (16, 32, 64):
        _whole_numbers(table, bits)
    _bits(table)
    return table

"""Instructions that compare, choose, convert and move."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.kernels.ptx.arithmetic import Pure, flushed, odd_f32
from tests.kernels.ptx.kinds import Numbers

_INTEGERS = [letter + str(bits) for letter in "su" for bits in (8, 16, 32, 64)]
_ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _or_nan(compare: Callable[[Any, Any], Any], a: Numbers, b: Numbers) -> Any:
    return compare(a, b) | np.isnan(a) | np.isnan(b)


def _halves(compare: Callable[[Any, Any], Any], a: Numbers, b: Numbers) -> tuple[Any, Any]:
    both = compare(a, b)
    return both[:, 0], both[:, 1]


def _compare(table: dict[str, Pure]) -> None:
    for name, compare in _ORDERED.items():
        for kind in [*_INTEGERS, "b16", "b32", "b64", "f32", "bf16", "f16"]:
            table[f"setp.{name}.{kind}"] = Pure(("pred",), (kind, kind), compare)
        for kind in ("f32", "bf16", "f16"):
            table[f"setp.{name}u.{kind}"] = Pure(("pred",), (kind,) * 2, partial(_or_nan, compare))
        for kind in ("bf16x2", "f16x2"):
            table[f"setp.{name}.{kind}"] = Pure(
                ("pred", "pred"), (kind, kind), partial(_halves, compare)
            )
    for kind in ("f32", "bf16", "f16"):
        table[f"setp.nan.{kind}"] = Pure(
            ("pred",), (kind, kind), lambda a, b: np.isnan(a) | np.isnan(b)
        )
    for kind in ("b16", "b32", "b64", "f32"):
        # Bits are chosen, not numbers: a NaN keeps its bits.
        raw = "b" + kind[1:]
        table[f"selp.{kind}"] = Pure(
            (raw,), (raw, raw, "pred"), lambda a, b, first: np.where(first, a, b)
        )


def _as_integer(low: int, high: int, x: Numbers) -> Numbers:
    """Toward zero, saturated; NaN is zero."""
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64))), low, high).astype(np.int64)


def _convert(table: dict[str, Pure]) -> None:
    for target, source in itertools.permutations(_INTEGERS, 2):
        table[f"cvt.{target}.{source}"] = Pure((target,), (source,), lambda x: x)
    for low, high in (("bf16", "f32"), ("f16", "f32")):
        table[f"cvt.{high}.{low}"] = Pure((high,), (low,), lambda x: x)
        table[f"cvt.rn.{low}.{high}"] = Pure((low,), (high,), lambda x: x)
    for kind in _INTEGERS:
        table[f"cvt.rn.f32.{kind}"] = Pure(("f32",), (kind,), lambda x: x)
    for kind, target in itertools.product(_INTEGERS, ("bf16", "f16")):
        if "64" not in kind:
            table[f"cvt.rn.{target}.{kind}"] = Pure(
                (target,), (kind,), lambda x: odd_f32(x.astype(np.float64))
            )
    table["cvt.rzi.s32.f32"] = Pure(("s32",), ("f32",), partial(_as_integer, -(2**31), 2**31 - 1))
    table["cvt.rmi.f32.f32"] = Pure(("f32",), ("f32",), np.floor)
    # NaN becomes 0.
    table["cvt.ftz.sat.f32.f32"] = Pure(
        ("f32",), ("f32",), lambda x: flushed(np.clip(np.where(np.isnan(x), 0, x), 0, 1))
    )
    # The first operand goes into the upper half.
    for pair in ("bf16x2", "f16x2", "satfinite.e4m3x2"):
        table[f"cvt.rn.{pair}.f32"] = Pure(
            (pair.rpartition(".")[2],),
            ("f32", "f32"),
            lambda a, b: np.stack(np.broadcast_arrays(b, a), -1),
        )
    table["cvt.rn.f16x2.e4m3x2"] = Pure(("f16x2",), ("e4m3x2",), lambda x: x)


def pure() -> dict[str, Pure]:
    """All instructions by their whole opcode, but moves of several registers."""
    table: dict[str, Pure] = {}
    _compare(table)
    _convert(table)
    return table

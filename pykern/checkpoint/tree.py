"""Nested values as JSON, and back.

Numbers, strings, booleans, None and lists stand for themselves. A value of a type that JSON lacks
is an object with one key, which names the type: a tensor, a tuple, a dict (whose keys may be
numbers), a Counter of ints, or a float that is not finite. Other types are not written or read.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..plan.files.strict_json import MAX_NESTING, shown
from ..tensors.dtensor import is_dtensor
from .errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str)
# The levels within the index, without those of the index object and of an encoded tensor or number.
_LEVELS = MAX_NESTING - 2
_NOT_FINITE = ("nan", "inf", "-inf")


class _TooDeepError(Exception):
    """A value has more levels than a file may have."""


def encode(value: object, where: str, add: Callable[[str, Tensor], str]) -> Any:
    """The value as JSON.

    Args:
        value: The value to save.
        where: The value's name, which becomes a part of its tensors' names.
        add: Takes the name and the tensor, returns the tensor's key.

    Raises:
        CheckpointError: A part is of another type, or contains itself; the message names it.
    """
    try:
        return _encode(value, where, add, _LEVELS)
    except _TooDeepError:
        raise CheckpointError(
            f"{where} must have at most {_LEVELS} levels, got more. A container may contain itself"
        ) from None


def _encode(value: Any, where: str, add: Callable[[str, Tensor], str], levels: int) -> Any:
    """As `encode`; `levels` of lists and objects may still be opened."""
    kind = type(value)
    if isinstance(value, float):
        # This branch takes numpy's float64 too, which is a float.
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if kind in _PLAIN:
        if kind is int:
            _require_digits(value, where)
        return value
    if kind in (Tensor, nn.Parameter) or is_dtensor(value):
        return {"tensor": add(where, value)}
    if kind in (list, tuple):
        left = _levels_in(levels, 1 if kind is list else 2)
        items = [_encode(item, f"{where}/{index}", add, left) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind in (dict, Counter):
        value = value if kind is dict else _counter(value)
        left = _levels_in(levels, 3)
        pairs = [
            [_key(key, where), _encode(item, f"{where}/{key}", add, left)]
            for key, item in value.items()
        ]
        return {kind.__name__.lower(): pairs}
    raise CheckpointError(
        f"{where} must be a tensor, number, string, boolean, None, or a list, tuple or dict of "
        f"these, got a {type(value).__name__}: {shown(value)}"
    )


def _levels_in(levels: int, opened: int) -> int:
    """The number of levels left within a value that opens `opened` levels."""
    if opened > levels:
        raise _TooDeepError
    return levels - opened


def _key(key: object, where: str) -> str | int:
    if type(key) not in (str, int):
        raise CheckpointError(f"keys of {where} must be strings or ints, got {shown(key)}")
    if type(key) is int:
        _require_digits(key, where)
    return key  # type: ignore[return-value]


def _require_digits(number: int, where: str) -> None:
    """Refuses an int that Python does not write as decimal digits, and JSON has no other."""
    try:
        str(number)
    except ValueError:
        raise CheckpointError(
            f"{where} must have ints of at most {sys.get_int_max_str_digits()} digits, got one of "
            f"{number.bit_length()} bits. Save a text, such as hex(number)"
        ) from None


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `encode` wrote.

    Args:
        value: JSON from an untrusted file.
        read: Takes a tensor's key, returns the tensor.

    Raises:
        CheckpointError: The JSON does not have the form that `encode` writes.
    """
    if type(value) in _PLAIN and not (isinstance(value, float) and math.isinf(value)):
        # JSON's 1e999 is read as infinity, which `encode` writes in another form.
        return value
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise CheckpointError(
            f"a value of a checkpoint must be in a form that save writes, got {shown(value)}"
        )
    ((tag, body),) = value.items()
    if tag == "tensor" and isinstance(body, str):
        return read(body)
    if tag == "float" and body in _NOT_FINITE:
        return float(body)
    if tag == "tuple" and isinstance(body, list):
        return tuple(decode(item, read) for item in body)
    if tag in ("dict", "counter") and isinstance(body, list):
        items = dict(_pair(pair, read) for pair in body)
        if len(items) < len(body):
            raise CheckpointError(
                f"keys of a dict must occur once, got one twice in {shown(value)}"
            )
        return items if tag == "dict" else _counter(items)
    raise CheckpointError(
        f"a value of a checkpoint must be in a form that save writes, got {shown(value)}"
    )


def _pair(pair: Any, read: Callable[[str], Tensor]) -> tuple[str | int, Any]:
    if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)):
        raise CheckpointError(
            f"an entry of a dict must be a pair of key and value, got {shown(pair)}"
        )
    return pair[0], decode(pair[1], read)


def _counter(items: dict[Any, Any]) -> Counter[int]:
    """A Counter of ints only: other items may lack an order, which a Counter's repr needs."""
    if strange := [pair for pair in items.items() if {*map(type, pair)} != {int}]:
        raise CheckpointError(f"a Counter must count ints, got {shown(strange[0])}")
    return Counter(items)

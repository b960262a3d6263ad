"""JSON from untrusted sources: limited nesting, limited numbers, and no repeated keys.

Python's own reader stops at the interpreter's recursion limit, which differs between versions and
depends on the caller's stack. For repeated keys, Python's reader keeps the last value.
"""

import json
import re
import sys
from collections import Counter
from itertools import accumulate
from typing import Any

# Levels of lists and objects. A plan has 3 levels, the index of a checkpoint a few dozen.
MAX_NESTING = 200
# A value takes about a hundred bytes once it is read.
MAX_VALUES = 1 << 23
# No setting of Python's own limit is lower; Python's message tells how to lift that limit.
MAX_DIGITS = sys.int_info.str_digits_check_threshold

STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
NOT_MARKS = bytes(byte for byte in range(256) if byte not in b"[]{},")
STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def read_json(text: str, *, finite: bool = True, max_values: int = MAX_VALUES) -> Any:
    """The value that the text holds.

    Args:
        text: One value of JSON.
        finite: Whether NaN and Infinity, an extension of Python to JSON, are refused.
        max_values: The largest number of values, counting lists, objects and their contents.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, has too many values, or repeats a
            key, or a whole number is too long.
    """
    require_plausible(text, max_values)
    constant = refuse_constant if finite else None
    return parsed(text, object_pairs_hook=unique, parse_int=whole, parse_constant=constant)


def parsed(text: str, **hooks: Any) -> Any:
    """The value that Python's reader makes of the text with these hooks.

    Raises:
        ValueError: The text is not JSON, or a hook refuses a part of it.
    """
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        found = "its end" if error.pos >= len(text.rstrip()) else repr(text[error.pos])
        raise ValueError(
            f"the text must be JSON, got {found} at line {error.lineno}, column {error.colno}"
        ) from None


def decoded(data: bytes) -> str:
    """The text of these bytes.

    Raises:
        ValueError: They are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text must be UTF-8, got byte {data[error.start]} at offset {error.start}"
        ) from None


def require_plausible(text: str, max_values: int = MAX_VALUES) -> None:
    """Refuses a text of JSON with too many values or levels.

    The check uses less memory than the text and does not make values.
    """
    marks = STRING.sub("", text).encode("utf-8", "replace").translate(None, NOT_MARKS)
    # Each value except the first follows one of these marks.
    count = 1 + marks.count(b",") + marks.count(b"[") + marks.count(b"{")
    if count > max_values:
        raise ValueError(f"the JSON must have at most {max_values} values, got {count}")
    brackets = marks.translate(None, b",")
    if max(accumulate(map(STEP.__getitem__, brackets)), default=0) > MAX_NESTING:
        raise ValueError(f"the JSON must have at most {MAX_NESTING} levels, got more")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; json would keep the last of two equal keys."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"keys must occur once, got {shown(twice)} twice")
    return content


def whole(digits: str) -> int:
    """The number that the digits write; an interpreter refuses more of them than it is set to."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"numbers must have at most {MAX_DIGITS} digits, got {len(digits)}")
    return int(digits)


def refuse_constant(name: str) -> None:
    """Python's json takes NaN and Infinity, which are not JSON."""
    raise ValueError(f"numbers of JSON must be finite, got {name}")


def shown(value: object) -> str:
    """The value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

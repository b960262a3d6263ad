"""JSON from anybody: nested so far and no further, every key once.

Python's own reader stops at the interpreter's recursion limit, which is another in every version
and may be anywhere in the caller's stack; and of two equal keys it keeps the last.
"""

import json
import re
from collections import Counter
from itertools import accumulate
from typing import Any

# Lists and objects within each other. A plan has 3, what is saved with a checkpoint a few dozen.
MAX_NESTING = 200

STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def read_json(text: str, *, finite: bool = True) -> Any:
    """The value that the text holds.

    Args:
        text: One value of JSON.
        finite: Whether NaN and Infinity, which are not JSON but Python's, are refused.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or repeats a key.
    """
    if nesting_of(text) > MAX_NESTING:
        raise ValueError(f"the JSON is nested too deeply: {MAX_NESTING} levels are read")
    constant = refuse_constant if finite else None
    return json.loads(text, object_pairs_hook=unique, parse_constant=constant)


def nesting_of(text: str) -> int:
    """How many lists and objects are open at once, at most; in a text that is JSON."""
    brackets = STRING.sub("", text).encode("utf-8", "replace").translate(None, NOT_BRACKETS)
    return max(accumulate(map(STEP.__getitem__, brackets)), default=0)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; json would keep the last of two equal keys."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {shown(twice)} occurs twice")
    return content


def refuse_constant(name: str) -> None:
    """Python's json takes NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is not a number of JSON")


def shown(value: object) -> str:
    """The value in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

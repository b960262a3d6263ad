"""Values of known types as JSON, and back: numbers, strings, lists, dicts and dataclasses of them.

A type says what is read: nothing in the text names a class, so the text can make no other object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .strict_json import read_json, shown

Value = TypeVar("Value")

_ALL = "the value"

_PLAIN: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    type(None): (type(None),),
}


def to_text(value: Any) -> str:
    """The value as JSON; `from_text` reads it by the value's type."""
    return json.dumps(_plain(value), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Mapping):
        named = all(isinstance(key, str) for key in value)
        pairs = [[_plain(key), _plain(item)] for key, item in value.items()]
        return dict(pairs) if named else pairs
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def from_text(kind: type[Value], text: str) -> Value:
    """The value that the text holds.

    Args:
        kind: int, float, str, bool, None, range, an Enum, a dataclass, one of these or None, or a
            list, tuple, Sequence or Mapping of such.
        text: may be anybody's.

    Raises:
        ValueError: the text is not JSON, or holds another kind of value; the message says where.
    """
    found: Value = _read(kind, read_json(text, finite=False), _ALL)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    if kind in _PLAIN:
        if type(value) not in _PLAIN[kind]:
            raise ValueError(f"{where} must be a {kind.__name__}, got {shown(value)}")
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _read_name(kind, value, where)
    if isinstance(kind, UnionType):
        return _read_either(get_args(kind), value, where)
    if kind is range:
        return range(*_read(tuple[int, int], value, where))
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    return _read_parts(get_origin(kind), get_args(kind), value, where)


def _read_parts(origin: Any, of: tuple[Any, ...], value: Any, where: str) -> Any:
    if issubclass(origin, Mapping):
        return _read_mapping(of[0], of[1], value, where)
    _require(list, value, where)
    return _read_items(origin, of, value, where)


def _read_name(kind: type[Enum], value: Any, where: str) -> Enum:
    if not isinstance(value, str) or value not in kind.__members__:
        raise ValueError(f"{where} must be the name of a {kind.__name__}, got {shown(value)}")
    return kind[value]


def _read_either(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """None where that may be, else of the other kind."""
    if value is None and type(None) in kinds:
        return None
    (kind,) = (each for each in kinds if each is not type(None))
    return _read(kind, value, where)


def _read_mapping(of_key: Any, of: Any, value: Any, where: str) -> dict[Any, Any]:
    """An object, or a list of keys and values where keys are not strings."""
    if of_key is not str and value != {}:
        return dict(_read(list[tuple[of_key, of]], value, where))
    _require(dict, value, where)
    return {key: _read(of, item, f"{where}.{key}") for key, item in value.items()}


def _read_items(origin: Any, of: tuple[Any, ...], value: list[Any], where: str) -> Any:
    if origin is tuple and of[-1] is not ...:
        if len(value) != len(of):
            raise ValueError(f"{where} must be a list of {len(of)}, got {shown(value)}")
        kinds: Sequence[Any] = of
    else:
        kinds = [of[0]] * len(value)
    items = [
        _read(kind, item, f"{where}[{index}]")
        for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    ]
    make: Callable[[list[Any]], Any] = tuple if origin is tuple else list
    return make(items)


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    _require(dict, value, where)
    hints = get_type_hints(kind)
    if value.keys() != hints.keys():
        raise ValueError(f"{where} must have the keys {sorted(hints)}, got {shown(sorted(value))}")
    return kind(
        **{name: _read(hints[name], item, _inside(where, name)) for name, item in value.items()}
    )


def _inside(where: str, name: str) -> str:
    return name if where == _ALL else f"{where}.{name}"


def _require(kind: type, value: Any, where: str) -> None:
    if type(value) is not kind:
        raise ValueError(f"{where} must be a {kind.__name__}, got {shown(value)}")

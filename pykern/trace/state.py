"""State that a forward's Python may read beside its inputs, described for comparison."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, nn

from .values import PLAIN

# Attributes that torch keeps in a module, which are looked at elsewhere or do nothing.
TORCHS = frozenset(vars(nn.Module()))


class Same:
    """Equal to nothing but what it is of, which it keeps alive."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of


class Hashed:
    """A value as a part of keys, whose hash is computed once."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Hashed) and self.value == other.value


def described(value: Any, depth: int = 2) -> Hashable:
    """A description that equals another value's only if Python cannot tell the two apart.

    Plain values are compared as such, also within lists, dicts, sets and arrays of numpy; of
    anything else which it is, and what its attributes are where the depth is more than one.
    """
    if isinstance(value, float | complex):
        # The text tells zero from minus zero, and not-a-number equals itself.
        return type(value), repr(value)
    if isinstance(value, PLAIN):
        return type(value), value
    if depth > 0 and type(value) in (list, tuple, dict, set, frozenset):
        return type(value), _parts(value, depth - 1)
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return Same(value)
    if hasattr(value, "__array__") and hasattr(value, "tobytes"):
        return type(value), str(value.dtype), value.shape, value.tobytes()
    return Same(value), _parts(getattr(value, "__dict__", {}), depth - 1) if depth > 1 else None


def _parts(value: Any, depth: int) -> Hashable:
    if isinstance(value, dict):
        # As pairs: their order can be told.
        return tuple((key, described(part, depth)) for key, part in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return tuple(described(part, depth) for part in value)


def attributes(module: nn.Module) -> dict[str, Hashable]:
    """Those that the model's author gave it, described."""
    return {name: described(value, 1) for name, value in vars(module).items() if name not in TORCHS}


def _types_in(model: nn.Module) -> frozenset[Hashable]:
    """The types and shapes of all parameters, and the types of all buffers.

    It takes half the time of `model.parameters()`.
    """
    found: set[Hashable] = set()
    modules, seen = [model], {id(model)}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                found.add((parameter.dtype, parameter.shape))
        for buffer in module._buffers.values():
            if buffer is not None:
                found.add(buffer.dtype)
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                modules.append(part)
    return frozenset(found)


def state_of(model: nn.Module, opened: Iterable[nn.Module]) -> Hashed:
    """State that forwards of the opened modules may read: attributes, parts, types and shapes."""
    held = _types_in(model)
    seen: dict[int, int] = {}

    def once(value: Any) -> Hashable:
        # Modules may have large objects in common, such as a configuration.
        if isinstance(value, PLAIN) or id(value) not in seen:
            seen[id(value)] = len(seen)
            return described(value)
        return "seen", seen[id(value)]

    parts = tuple(
        (
            tuple(
                (name, once(value)) for name, value in vars(module).items() if name not in TORCHS
            ),
            tuple(map(Same, module._modules.values())),
        )
        for module in opened
    )
    return Hashed((held, parts))

"""Objects of unknown classes that hold tensors, such as caches: what is in them, and copies."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..tensors.trees import is_sequence, leaves_of, like
from ..user_code import user_line
from .errors import CutError
from .state import described
from .values import PLAIN, Build, Here, builder

# A step from an object into it: whether by an attribute, else by an item; and its name or key.
Hop = tuple[bool, Any]


def find(thing: Any, steps: Sequence[Hop]) -> Any:
    """The part of a thing that some steps lead to."""
    for is_attribute, key in steps:
        thing = vars(thing)[key] if is_attribute else thing[key]
    return thing


@dataclass
class Shells:
    """Objects without their tensors.

    Attributes:
        empty: by number, a copy of the object without the parts that have numbers themselves; None
            for a tensor or a tuple.
        slots: the numbers of the tensors.
        tuples: the number of each tuple, the tuple without parts that have numbers, and these;
            tuples within others come first.
        edges: number of the outer object, step, and number of the part.
        roots: number of each object that was asked for; None where there is nothing to copy.
    """

    empty: list[Any]
    slots: list[int]
    tuples: list[tuple[int, Any, dict[int, int]]]
    edges: list[tuple[int, Hop, int]]
    roots: list[int | None]

    def filled(self, tensors: Sequence[Any]) -> list[Any]:
        """New objects that hold these tensors."""
        # torch's compiler sees through a list's own method, and not through that of `copy`.
        made = [
            shell.copy() if type(shell) in (list, dict) else copy.copy(shell)
            for shell in self.empty
        ]
        for slot, tensor in zip(self.slots, tensors, strict=True):
            made[slot] = tensor
        for number, parts, inner in self.tuples:
            made[number] = like(
                parts, [made[inner[n]] if n in inner else p for n, p in enumerate(parts)]
            )
        for outer, (is_attribute, key), part in self.edges:
            (vars(made[outer]) if is_attribute else made[outer])[key] = made[part]
        return [None if root is None else made[root] for root in self.roots]


class HandedIn:
    """The content of the objects of unknown classes that a call is given.

    Args:
        shells: of the objects.
        parts: the stand-ins for their tensors.
    """

    def __init__(self, shells: Shells, parts: Sequence[Any]) -> None:
        self._shells = shells
        self.parts = list(parts)
        self._tensors: Build = builder(self.parts)

    def objects(self, here: Here) -> list[Any]:
        """New objects for a call."""
        return self._shells.filled(self._tensors(here))


class Holdings:
    """The present content of some objects.

    Args:
        roots: the objects.

    Attributes:
        roots: as given.
        shells: copies of the objects.
        holds: whether there is a tensor in the objects.
        tensors: in the objects, each once, in the order of the shells' slots.
        steps: for each tensor, the number of a root and the steps from there.
        around: for each tensor, the identities of the objects on this way.
        plain: the numbers, texts and the like in the objects, by the way to them.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = roots
        self.holds = False
        self.tensors: list[Tensor] = []
        self.steps: list[tuple[int, tuple[Hop, ...]]] = []
        self.around: list[set[int]] = []
        self.plain: dict[Any, Hashable] = {}
        self.shells = Shells([], [], [], [], [])
        self._numbers: dict[int, int] = {}
        # Why objects cannot be copied.
        self._reasons: list[str] = []
        for number, root in enumerate(roots):
            self._root = number
            self.shells.roots.append(self._visit(root, (), ()))

    @property
    def inside(self) -> Collection[int]:
        """The identities of the objects, and of those in them."""
        return self._numbers.keys()

    def require_copies(self) -> None:
        """Raises CutError where there cannot be objects like these for each microbatch."""
        if self._reasons:
            raise CutError(
                f"{self._reasons[0]} ({user_line()}), which microbatches would share. Pass "
                "tensors, or tuples, lists, dicts and dataclasses of them"
            )

    def carrier_of(self, leaf: Any) -> int | None:
        """The number of the root that a leaf is; None for other leaves and for roots not copied."""
        copied = zip(self.roots, self.shells.roots, strict=True)
        is_it = [root is leaf and found is not None for root, found in copied]
        return is_it.index(True) if any(is_it) else None

    def _visit(self, thing: Any, steps: tuple[Hop, ...], around: tuple[int, ...]) -> int | None:
        """The number of a thing; None where copies may share it."""
        if id(thing) in self._numbers:
            return self._numbers[id(thing)]
        if isinstance(thing, Tensor):
            number = self._number(thing, None)
            self.tensors.append(thing)
            self.holds = True
            self.shells.slots.append(number)
            self.steps.append((self._root, steps))
            self.around.append(set(around))
            return number
        if isinstance(thing, PLAIN):
            self.plain[self._root, steps] = described(thing)
            return None
        around = (*around, id(thing))
        if isinstance(thing, tuple):
            return self._visit_tuple(thing, steps, around)
        if any(isinstance(leaf, Tensor) for leaf in leaves_of(list(_hidden(thing)))):
            self.holds = True
            kind = type(thing).__name__
            self._reasons.append(
                f"a {kind} is handed on with tensors that cannot be replaced in it"
            )
        if not _is_open(thing):
            return None
        shell = self._copy(thing)
        number = self._number(thing, shell)
        for step, part in list(_parts(thing)):
            inner = self._visit(part, (*steps, step), around)
            if inner is not None:
                is_attribute, key = step
                if shell is not thing:
                    (vars(shell) if is_attribute else shell)[key] = None
                self.shells.edges.append((number, step, inner))
        return number

    def _visit_tuple(
        self, thing: Any, steps: tuple[Hop, ...], around: tuple[int, ...]
    ) -> int | None:
        found = {n: self._visit(p, (*steps, (False, n)), around) for n, p in enumerate(thing)}
        inner = {n: number for n, number in found.items() if number is not None}
        if not inner or not is_sequence(thing):
            return None
        number = self._number(thing, None)
        parts = like(thing, [None if n in inner else part for n, part in enumerate(thing)])
        self.shells.tuples.append((number, parts, inner))
        return number

    def _copy(self, thing: Any) -> Any:
        try:
            return copy.copy(thing)
        except Exception as error:
            self._reasons.append(
                f"a {type(thing).__name__} is handed on that cannot be copied ({error})"
            )
            return thing

    def _number(self, thing: Any, shell: Any) -> int:
        number = self._numbers[id(thing)] = len(self.shells.empty)
        self.shells.empty.append(shell)
        return number


def _is_open(thing: Any) -> bool:
    """Whether it is looked into, and copied."""
    if isinstance(thing, type | nn.Module | Enum | ModuleType) or callable(thing):
        return False
    return isinstance(thing, dict | list | deque) or hasattr(thing, "__dict__")


def _parts(thing: Any) -> Iterator[tuple[Hop, Any]]:
    """The things in a thing that can be written there."""
    if isinstance(thing, dict):
        yield from (((False, key), part) for key, part in thing.items())
    if isinstance(thing, list | deque):
        yield from (((False, number), part) for number, part in enumerate(thing))
    yield from (((True, name), part) for name, part in getattr(thing, "__dict__", {}).items())


def _hidden(thing: Any) -> Iterator[Any]:
    """The things in a thing that cannot be written there by a key or a name of its dictionary."""
    if isinstance(thing, set | frozenset):
        yield from thing
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(thing, name, None)

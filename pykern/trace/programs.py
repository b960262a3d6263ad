"""The programs of a model, by the calls that they are for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ..tensors.trees import Spec
from .program import Program

# So many programs are kept, such as for different lengths of a sequence.
MAX_PROGRAMS = 128


class Programs:
    """Keeps what was used last; a program that comes again after that is recorded again."""

    def __init__(self) -> None:
        # The key used last is the last.
        self._known: dict[Hashable, list[Program]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def of(self, key: Hashable) -> Sequence[Program]:
        """The programs for calls of this key; they differ in the values that they read."""
        known = self._known.pop(key, None)
        if known is None:
            return ()
        self._known[key] = known
        return known

    def add(self, key: Hashable, program: Program) -> None:
        """Keeps a program for calls of this key."""
        self._known.setdefault(key, []).append(program)
        for programs in self._known.values():
            del programs[:-MAX_PROGRAMS]
        while len(self) > MAX_PROGRAMS:
            del self._known[next(iter(self._known))]

    def replace(self, other: Callable[[Program], Program]) -> None:
        """Puts another program in the place of each."""
        for programs in self._known.values():
            programs[:] = map(other, programs)

    def clear(self) -> None:
        """Forgets all programs."""
        self._known.clear()


class Form:
    """How leaves are arranged, as a key: torch's descriptions of that cannot be hashed."""

    __slots__ = ("spec",)

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return self.spec.num_leaves

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.spec == other.spec

"""Cut tapes by what they were recorded for, as many as memory should hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from .cut_tape import CutTape
from .state import Hashed

# So many cut tapes are kept, such as for different lengths of a sequence.
MAX_CUT_TAPES = 128

# The modes at a time, and the state that forwards may read then.
Moment = tuple[Hashable, Hashed]
# The key of a call, and when it is made.
Key = tuple[Hashable, Moment]


class TapeCache:
    """The cut tapes of the keys that were used last; one that is dropped is recorded again."""

    def __init__(self) -> None:
        # The key used last is the last.
        self._of_keys: dict[Key, list[CutTape]] = {}

    def __iter__(self) -> Iterator[CutTape]:
        return (cut_tape for known in self._of_keys.values() for cut_tape in known)

    def of(self, key: Key) -> Sequence[CutTape]:
        """The cut tapes of a key, which is used now."""
        known = self._of_keys.pop(key, [])
        if known:
            self._of_keys[key] = known
        return known

    def add(self, key: Key, cut_tape: CutTape) -> None:
        """Adds a cut tape, and drops those above the bound."""
        self._of_keys.setdefault(key, []).append(cut_tape)
        for known in self._of_keys.values():
            del known[:-MAX_CUT_TAPES]
        while sum(map(len, self._of_keys.values())) > MAX_CUT_TAPES:
            del self._of_keys[next(iter(self._of_keys))]

    def replace(self, other: Callable[[CutTape], CutTape]) -> None:
        """Puts another cut tape in the place of each."""
        self._of_keys = {
            key: [other(cut_tape) for cut_tape in known] for key, known in self._of_keys.items()
        }

    def clear(self) -> None:
        """Drops all."""
        self._of_keys.clear()

"""Random numbers that a forward draws without torch while it is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ..user_code import user_line
from .errors import CutError
from .reach import named, places_of
from .sources import Source, everyones, source_of


class Generators:
    """Those that a forward can draw from, beside torch's default ones.

    A recorded forward has drawn once and for ever, where a module that stays whole draws again.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        sources = [*everyones(), *_kept(modules)]
        self._before = [(one, one.get()) for one in sources]
        self._watched = [one for one in sources if not one.is_torchs]
        self.look()

    def look(self) -> None:
        """Ignores the draws made so far."""
        self._marks = [one.mark() for one in self._watched]

    def require_same(self, where: str = "") -> None:
        """Refuses what has been drawn since the last look.

        Args:
            where: that is; empty for the line of the model's code that is running.

        Raises:
            CutError: anything has.
        """
        for one, mark in zip(self._watched, self._marks, strict=True):
            if one.mark() != mark:
                raise CutError(
                    f"the forward draws random numbers from {one.name} ({where or user_line()}, or "
                    "before it), which would keep the sample's values. Draw with torch, draw "
                    "outside of the model and pass the numbers as arguments, or keep the module "
                    "that draws whole (whole=[...])"
                )

    def put_back(self) -> None:
        """Has all draw what they would have drawn in the beginning."""
        for one, state in self._before:
            one.set(state)


def _kept(modules: Iterable[nn.Module]) -> Iterator[Source]:
    """The generators that modules keep, and those that their forwards name."""
    seen: set[int] = set()
    for place in places_of(modules).values():
        for key, value in list(place.read().items()):
            source = None if id(value) in seen else source_of(named(place, key), value)
            if source is not None:
                seen.add(id(value))
                yield source

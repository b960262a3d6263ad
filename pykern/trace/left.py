"""Numbers that a forward and the modules which it calls leave for each other in objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from torch import nn

from ..user_code import user_line
from .errors import CutError
from .reach import Place, named, places_of, word_of, words_of

# By the identity of a place, what is in it.
_Values = dict[int, dict[Any, Hashable]]


class Left:
    """Refuses numbers that pass between a forward and modules that stay whole, beside arguments.

    The forward's own Python does not run again for each microbatch, and that of the modules does:
    they would find what was set for the sample, and what they set would not be read again.

    Args:
        model: whose forward.
        opened: the modules whose Python does not run again.
    """

    def __init__(self, model: nn.Module, opened: Collection[nn.Module]) -> None:
        self._places: dict[nn.Module, dict[int, Place]] = {}
        for parent in model.modules():
            if parent in opened:
                for child in parent.children():
                    if child not in opened and child not in self._places:
                        self._places[child] = places_of(child.modules())
        times = Counter(key for places in self._places.values() for key in places)
        # Calls of one module change what others can read as well.
        self._shared = {
            key: place
            for places in self._places.values()
            for key, place in places.items()
            if times[key] > 1
        }
        # The names in the forward's own Python.
        self._words = words_of(module for module in model.modules() if module in opened)
        self._known: _Values = {}
        for places in self._places.values():
            self._look(places)

    def before(self, module: nn.Module, name: str) -> None:
        """A module that stays whole is about to be called.

        Raises:
            CutError: something that it can read has been set since it was called last.
        """
        for key, place in self._places.get(module, {}).items():
            known = self._known[key]
            for at, value in place.values().items():
                if at not in known or known[at] != value:
                    raise CutError(
                        f"the forward sets {named(place, at)} before it calls {name} "
                        f"({user_line()}), which can read it: this would not be repeated for each "
                        "microbatch. Pass it as an argument, or keep both within one module that "
                        "stays whole (whole=[...])"
                    )

    def after(self, module: nn.Module, name: str, *, has_read: bool) -> None:
        """The module has returned: what it has changed itself it will change again.

        Args:
            module: which.
            name: what it is called.
            has_read: whether it has read values of tensors, to go on in Python.

        Raises:
            CutError: it has left such a value where the forward around may read it.
        """
        places = self._shared | self._places.get(module, {})
        before = {key: self._known[key] for key in places}
        self._look(places)
        if not has_read:
            return
        for key, place in places.items():
            for at, value in self._known[key].items():
                if before[key].get(at) != value and word_of(place, at) in self._words:
                    raise CutError(
                        f"{name} ({user_line()}) sets {named(place, at)} to a value that it has "
                        "read of a tensor, and the forward around it names that place: it would "
                        "keep the sample's value. Return it from the module as a tensor, or keep "
                        "both within one module that stays whole (whole=[...])"
                    )

    def _look(self, places: Mapping[int, Place]) -> None:
        for key, place in places.items():
            self._known[key] = place.values()

"""Arguments of modules of which nothing is known, such as caches, and tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..tensors.trees import Call, leaves_of, map_tree
from ..user_code import user_line
from .crossings import Crossings
from .errors import CutError, ReplayError
from .numbered_tensors import NumberedTensors
from .objects import HandedIn, Holdings, find
from .origins import storages_of
from .reach import places_of
from .tape import Instruction
from .values import PLAIN, Carrier


def foreign_in(tree: Any) -> list[Any]:
    """The arguments of a tree of which nothing is known, each once."""
    known = (Tensor, nn.Module, type, *PLAIN)
    found = {id(leaf): leaf for leaf in leaves_of(tree) if not isinstance(leaf, known)}
    return list(found.values())


class Carriers:
    """The objects through which the modules of a forward hand tensors to each other.

    Args:
        model: whose forward.
        call: its arguments.
        crossings: which follow its tensors.
        made: the tensors that have numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        crossings: Crossings,
        made: NumberedTensors,
    ) -> None:
        self._model = model
        self._arguments = {*Holdings(foreign_in(call)).inside}
        self._crossings = crossings
        self._made = made

    def carried(
        self,
        before: Holdings,
        after: Holdings,
        name: str,
        touched: Iterable[Tensor],
        stand_in: Callable[[Tensor], Any],
    ) -> HandedIn | None:
        """The content of the objects that a module was given; None if they never hold tensors.

        A tensor that the module has not used is replaced by one without values, so that stages need
        not pass it on.

        Args:
            before: of the objects that it was given.
            after: of the same objects, behind the call.
            name: of the module.
            touched: the tensors that it has written or returned.
            stand_in: gives what stands for a tensor in the tape.

        Raises:
            CutError: the objects are not the forward's own, or hold numbers that depend on tensors.
        """
        has_read = self._crossings.follow.has_read
        if not (before.holds or after.holds or (has_read and after.inside)):
            return None
        before.require_copies()
        after.require_copies()
        self._require_own(after, name)
        if has_read:
            _require_constant(before, after, name)
        used = self._crossings.follow.used.union(
            storage._cdata for storage in storages_of(list(touched))
        )
        parts = [
            stand_in(tensor)
            if _is_in(tensor, used) or self._crossings.is_constant(tensor)
            else tensor.detach().to("meta")
            for tensor in before.tensors
        ]
        return HandedIn(before.shells, parts)

    def left(self, before: Holdings, after: Holdings) -> Iterator[Instruction]:
        """Instructions that give numbers to the tensors that a module has left in objects."""
        known = {id(tensor) for tensor in before.tensors}
        for tensor, (root, steps) in zip(after.tensors, after.steps, strict=True):
            if id(tensor) not in known and self._made.find(tensor) is None:
                number = self._made.number(tensor)
                instruction = Instruction(
                    find, ((Carrier(root), steps), {}), [number], [], None, user_line()
                )
                self._made.note(instruction, early=False)
                yield instruction
        if self._crossings.follow.has_read:
            # The module may have used the objects in a way that depends on the values it has read.
            objects = tuple(
                after.roots[number] if copied is None else Carrier(number)
                for number, copied in enumerate(before.shells.roots)
            )
            check = partial(_require_recorded, set(after.steps), after.plain)
            yield Instruction(check, (objects, {}), [], [], None, user_line())

    def _require_own(self, after: Holdings, name: str) -> None:
        around = set[int]().union(*after.around)
        if around & self._arguments:
            whose = "is an argument of the model"
        elif around & places_of(self._model.modules()).keys():
            whose = "outlives the call of the model"
        else:
            return
        kinds = ", ".join(type(root).__name__ for root in after.roots)
        raise CutError(
            f"{name} is given a {kinds} ({user_line()}), which holds tensors and {whose}: "
            "microbatches would share it. Pass tensors, or tuples, lists, dicts and dataclasses "
            "of them, or have the forward make the object (Hugging Face: no cache or "
            "past_key_values; generate() is the model's)"
        )


def _require_constant(before: Holdings, after: Holdings, name: str) -> None:
    """Refuses numbers in objects that a module has changed after it has read values of tensors."""
    changed = [where for where, value in after.plain.items() if before.plain.get(where) != value]
    for number, steps in changed:
        kind = type(after.roots[number]).__name__
        inside = "".join(f".{key}" if is_name else f"[{key!r}]" for is_name, key in steps)
        raise CutError(
            f"{name} ({user_line()}) reads values of a tensor and sets {kind}{inside}, which would "
            "keep the sample's value. Keep a tensor there, or have both modules in one that stays "
            "whole (whole=[...])"
        )


def _require_recorded(steps: Collection[Any], plain: Mapping[Any, Hashable], *roots: Any) -> None:
    """Refuses objects with other tensors or numbers in them than when the forward was recorded."""
    now = Holdings(roots)
    if set(now.steps) != steps or now.plain != plain:
        kinds = ", ".join(type(root).__name__ for root in roots)
        raise ReplayError(
            f"a module reads values of tensors and leaves something else in a {kinds} than when "
            "the forward of the model was recorded. Let the module around it stay whole "
            "(whole=[...])"
        )


def refuse_objects(before: Holdings, name: str) -> None:
    """Refuses objects with tensors that an autograd function of this name is given."""
    if before.holds or Holdings(before.roots).holds:
        kinds = ", ".join(type(root).__name__ for root in before.roots)
        raise CutError(
            f"{name} is given a {kinds} ({user_line()}), which holds tensors. Pass the tensors "
            "themselves, or call it within a module that stays whole"
        )


def _is_in(tensor: Tensor, memory: Collection[int]) -> bool:
    addresses = {storage._cdata for storage in storages_of(tensor)}
    # The memory of some subclasses is not known.
    return not addresses or not addresses.isdisjoint(memory)


def with_carriers(call: Call, now: Holdings) -> Call:
    """The arguments of a call with what stands for objects in them."""

    def replaced(leaf: Any) -> Any:
        number = now.carrier_of(leaf)
        return leaf if number is None else Carrier(number)

    args, kwargs = map_tree(replaced, call)
    return args, kwargs


@dataclass(frozen=True)
class Withheld:
    """Stands in the output of a pipeline for an object that stages have filled with tensors.

    Attributes:
        kind: the name of its class.
    """

    kind: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name if name.startswith("__") else self._text(name))

    def __getitem__(self, key: object) -> Any:
        raise KeyError(self._text(key))

    def _text(self, key: object) -> str:
        return (
            f"the model returns a {self.kind} with tensors, which a pipeline does not return: "
            f"{key!r} is not there. Return tensors, or tuples, lists, dicts and dataclasses of them"
        )


def without_objects(leaf: Any) -> Any:
    """A leaf of an output that is not a tensor, or what stands for it where it holds tensors."""
    if foreign_in(leaf) and Holdings([leaf]).holds:
        return Withheld(type(leaf).__name__)
    return leaf

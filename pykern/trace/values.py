"""Arguments of the instructions of a tape: values of the tape, names, and anything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.trees import flatten, is_sequence, leaves_of, like, map_tree, unflatten


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that comes into the tape or that one of its instructions has made."""

    number: int


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter or buffer of the model, by its name there."""

    name: str
    is_parameter: bool

    @property
    def key(self) -> str:
        """The name that it has in a segment."""
        return key_of(self.name)


@dataclass(frozen=True, slots=True)
class Home:
    """The device of whichever stage runs the instruction.

    Attributes:
        device: that of all where there is one.
    """

    device: torch.device


@dataclass(frozen=True, slots=True)
class Carrier:
    """An object of an unknown class that is made anew for the call, by its number in the call."""

    number: int


@dataclass(slots=True)
class Here:
    """Where a tree is built: the values that there are, and what a segment holds.

    Attributes:
        values: by number.
        parameters, buffers: by key.
        device: of the stage; None where everything is in one place.
        objects: those that were made for the last call that is given any.
    """

    values: dict[int, Any]
    parameters: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]
    device: torch.device | None
    objects: Sequence[Any] = ()


# Types of values without parts, which are equal only if no reader can tell them apart.
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, range,
)  # fmt: skip

Build = Callable[[Here], Any]


def key_of(name: str) -> str:
    """A name of the model as a name within one module, which has no dots."""
    return name.replace(".", "/")


def builder(tree: Any) -> Build:
    """A function that gives the tree with values in the place of what stands for them."""
    if isinstance(tree, Ref):
        number = tree.number
        return lambda here: here.values[number]
    if isinstance(tree, Held):
        return _held_builder(tree)
    if isinstance(tree, Home):
        home = tree.device
        return lambda here: here.device or home
    if isinstance(tree, Carrier):
        place = tree.number
        return lambda here: here.objects[place]
    if not any(isinstance(leaf, Ref | Held | Home | Carrier) for leaf in leaves_of(tree)):
        # Made anew where it can be written: a callee may keep or change what it is given.
        is_plain = isinstance(tree, PLAIN)
        return (lambda _: tree) if is_plain else (lambda _: map_tree(_same, tree))
    return _tree_builder(tree)


def _values_builder(numbers: Sequence[int]) -> Build:
    """A function that gives some values, the arguments of most calls."""
    if len(numbers) == 1:
        (number,) = numbers
        return lambda here: (here.values[number],)
    return lambda here: tuple([here.values[number] for number in numbers])


def _tree_builder(tree: Any) -> Build:
    if type(tree) is tuple and all(isinstance(part, Ref) for part in tree):
        return _values_builder([part.number for part in tree])
    if is_sequence(tree):
        parts = [builder(part) for part in tree]
        return lambda here: like(tree, [part(here) for part in parts])
    if type(tree) is dict:
        items = [(key, builder(part)) for key, part in tree.items()]
        return lambda here: {key: part(here) for key, part in items}
    if type(tree) is slice:
        ends = [builder(part) for part in (tree.start, tree.stop, tree.step)]
        return lambda here: slice(*[end(here) for end in ends])
    leaves, spec = flatten(tree)
    inner = [builder(leaf) for leaf in leaves]
    return lambda here: unflatten([part(here) for part in inner], spec)


def _held_builder(held: Held) -> Build:
    key = held.key
    if held.is_parameter:
        return lambda here: here.parameters[key]
    return lambda here: here.buffers[key]


def refs_in(tree: Any) -> list[int]:
    """The numbers of the values that stand in a tree."""
    return [leaf.number for leaf in leaves_of(tree) if isinstance(leaf, Ref)]


def held_in(tree: Any) -> list[Held]:
    """The parameters and buffers that stand in a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Held)]


def held_of(model: nn.Module) -> dict[int, Held]:
    """Parameters and buffers by identity, under the first name of one that has several."""
    found = {id(tensor): Held(name, True) for name, tensor in model.named_parameters()}
    return found | {id(tensor): Held(name, False) for name, tensor in model.named_buffers()}


def _same(leaf: Any) -> Any:
    return leaf

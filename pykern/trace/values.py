"""What the instructions of a tape are called with: values of the tape, names, and anything else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_Node = TypeVar("_Node")


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


@dataclass(slots=True)
class Here:
    """Where a tree is built: the values that there are, and what a segment holds.

    Attributes:
        values: by number.
        parameters, buffers: by key.
        device: of the stage; None where everything is in one place.
    """

    values: dict[int, Any]
    parameters: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]
    device: torch.device | None


# What has no parts, and equals only what is the same to all who look at it.
PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size, range,
)  # fmt: skip
# What is known to be a leaf of a tree.
_LEAVES = (Tensor, Ref, Held, Home)

Build = Callable[[Here], Any]


def key_of(name: str) -> str:
    """A name of the model as a name within one module, which has no dots."""
    return name.replace(".", "/")


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with the function applied to its leaves, also to those within slices."""
    if isinstance(tree, _LEAVES):
        return function(tree)
    if _is_sequence(tree):
        return _like(tree, [map_tree(function, part) for part in tree])
    if type(tree) is dict:
        return {key: map_tree(function, part) for key, part in tree.items()}
    if type(tree) is slice:
        return slice(*(map_tree(function, part) for part in (tree.start, tree.stop, tree.step)))
    leaves, spec = flatten(tree)
    if spec.is_leaf():
        return function(tree)
    return pytree.tree_unflatten([map_tree(function, leaf) for leaf in leaves], spec)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """As torch's pytree does it, which learns here of dataclasses that it does not know."""
    leaves, spec = pytree.tree_flatten(tree)
    strange = {type(leaf) for leaf in leaves if _is_dataclass_of_tensors(leaf)}
    if not strange:
        return leaves, spec
    for kind in strange:
        _register(kind)
    return flatten(tree)


def _is_sequence(tree: Any) -> bool:
    return type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))


def _like(tree: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple of the same type."""
    # Without the __new__ of the type, which may look at what it is given: PackedSequence's does.
    return parts if type(tree) is list else tuple.__new__(type(tree), parts)


def _is_dataclass_of_tensors(leaf: Any) -> bool:
    if isinstance(leaf, nn.Module | type | Tensor) or not dataclasses.is_dataclass(leaf):
        return False
    return any(isinstance(part, Tensor) for part in leaves_of(_fields(leaf)))


def _fields(node: Any) -> list[Any]:
    return [getattr(node, field.name) for field in dataclasses.fields(node)]


def _register(kind: type[_Node]) -> None:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    def apart(node: _Node) -> tuple[list[Any], list[str]]:
        return [getattr(node, name) for name in names], names

    def with_names(node: _Node) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:
        return [(pytree.GetAttrKey(name), getattr(node, name)) for name in names], names

    def together(values: Any, _: Any) -> _Node:
        # Without __init__, which may take other arguments or do more than to set fields.
        node = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(node, name, value)
        return node

    pytree.register_pytree_node(
        kind,
        apart,
        together,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_names,
    )


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
    if not any(isinstance(leaf, Ref | Held | Home) for leaf in leaves_of(tree)):
        # Made anew where it can be written: a callee may keep or change what it is given.
        return lambda _: map_tree(_same, tree)
    return _tree_builder(tree)


def _tree_builder(tree: Any) -> Build:
    if _is_sequence(tree):
        parts = [builder(part) for part in tree]
        return lambda here: _like(tree, [part(here) for part in parts])
    if type(tree) is dict:
        items = [(key, builder(part)) for key, part in tree.items()]
        return lambda here: {key: part(here) for key, part in items}
    if type(tree) is slice:
        ends = [builder(part) for part in (tree.start, tree.stop, tree.step)]
        return lambda here: slice(*[end(here) for end in ends])
    leaves, spec = flatten(tree)
    inner = [builder(leaf) for leaf in leaves]
    return lambda here: pytree.tree_unflatten([part(here) for part in inner], spec)


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


def _same(leaf: Any) -> Any:
    return leaf

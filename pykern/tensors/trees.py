"""Trees: tuples, lists, dicts and other containers, as torch's pytree knows them, and dataclasses.

torch's pytree takes a dataclass for a leaf. `flatten` registers each dataclass that holds tensors
when it first meets one, so every walk over a user's values goes through this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_Node = TypeVar("_Node")

Spec = pytree.TreeSpec
# Common leaves beside tensors.
_ATOMS = {type(None), bool, int, float, str, torch.dtype, torch.device}
# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a tree in order, and its structure."""
    found, spec = pytree.tree_flatten(tree)
    strange = {type(leaf) for leaf in found if _is_dataclass_of_tensors(leaf)}
    if not strange:
        return found, spec
    for kind in strange:
        _register(kind)
    return flatten(tree)


def opened(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The leaves of a tree in order, and a function that makes such a tree of others.

    As `flatten`, which takes longer and leaves a reference cycle each time: most nodes have none
    below them.
    """
    node = pytree.SUPPORTED_NODES.get(type(tree))
    if node is not None:
        children, context = node.flatten_fn(tree)
        parts = list(children)
        if all([type(part) in _ATOMS or isinstance(part, Tensor) for part in parts]):
            return parts, lambda others: node.unflatten_fn(others, context)
    found, spec = flatten(tree)
    return found, lambda others: unflatten(others, spec)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree in order, those of `flatten`, in less time as in `opened`."""
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, Tensor):
        return [tree]
    if kind is not dict and kind is not tuple and kind is not list:
        return opened(tree)[0]
    found: list[Any] = []
    for part in tree.values() if kind is dict else tree:
        if type(part) in _ATOMS or isinstance(part, Tensor):
            found.append(part)
        else:
            found += leaves(part)
    return found


def unflatten(parts: Iterable[Any], spec: Spec) -> Any:
    """The tree of a structure with these leaves."""
    return pytree.tree_unflatten(parts, spec)


def with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree in order, each with its path as Python writes it, such as `['a'][0]`."""
    flatten(tree)
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def all_tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree in order, one that occurs twice also twice."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree in order, each once."""
    return list({id(tensor): tensor for tensor in all_tensors(tree)}.values())


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with the function applied to its tensors."""
    found, spec = flatten(tree)
    return unflatten([function(x) if isinstance(x, Tensor) else x for x in found], spec)


def map_nodes(kind: type[_Node], function: Callable[[_Node], Any], tree: Any) -> Any:
    """The tree with the function applied to nodes of a type."""
    if isinstance(tree, Tensor):
        return tree

    def is_one(node: object) -> bool:
        return isinstance(node, kind)

    return pytree.tree_map(lambda x: function(x) if is_one(x) else x, tree, is_leaf=is_one)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with the function applied to its leaves, and to the ends of slices."""
    if isinstance(tree, Tensor) or type(tree) in _ATOMS:
        return function(tree)
    if is_sequence(tree):
        return like(tree, [map_tree(function, part) for part in tree])
    if type(tree) is dict:
        return {key: map_tree(function, part) for key, part in tree.items()}
    if type(tree) is slice:
        return slice(*(map_tree(function, part) for part in (tree.start, tree.stop, tree.step)))
    found, spec = flatten(tree)
    if spec.is_leaf():
        return function(tree)
    return unflatten([map_tree(function, leaf) for leaf in found], spec)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree in order, with the ends of slices."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree in order, also those that are ends of slices."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def is_sequence(tree: Any) -> bool:
    """Whether the tree is a tuple, a list or a named tuple."""
    return type(tree) in (tuple, list) or (isinstance(tree, tuple) and hasattr(tree, "_fields"))


def like(tree: Any, parts: list[Any]) -> Any:
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

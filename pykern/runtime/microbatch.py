"""Cuts a batch into microbatches, and joins their results. No layer runs here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.trees import flatten, leaves, unflatten, with_paths
from ..trace.values import PLAIN

# How deep objects of unknown classes are looked into, and how many parts of each at most.
_DEPTH, _MOST = 3, 100


class SplitError(ValueError):
    """The batch, or the results of its microbatches, cannot be cut or joined along dimension 0."""


def sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch: as even as possible, larger ones first, empty ones last.

    A batch of 5 in 8 microbatches gives five of 1 row and three of 0 rows, which are not run.
    """
    rows, larger = divmod(batch_size, num_microbatches)
    return [rows + 1] * larger + [rows] * (num_microbatches - larger)


def batch_size(tree: Any, *, graphs: bool = True) -> int:
    """Size of dimension 0, on which all tensors of the tree that have one must agree.

    A tree that is a dict of arguments by name lets messages name them. Without `graphs`, tensors
    must have no autograd graph: the backward of the first microbatch would free the graph, which
    all microbatches share.

    Raises:
        SplitError: no tensor has a dimension 0, tensors differ in it, a tensor is not dense, or the
            batch is empty.
        RuntimeError: a tensor has an autograd graph, and must not.
    """
    rows: list[int] = []
    others: list[Any] = []
    for leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            others.append(leaf)
        elif leaf.layout is not torch.strided or leaf.is_nested:
            kind = "nested" if leaf.is_nested else str(leaf.layout)
            raise SplitError(
                f"tensors of a batch must be dense, got a {kind} one, which cannot be cut into "
                "microbatches. Give dense tensors, such as to_dense() or to_padded_tensor() returns"
            )
        elif leaf.grad_fn is not None and not graphs:
            raise RuntimeError(
                "tensors of the batch must have no graph of their own, which each microbatch "
                f"would run backward, got shape {tuple(leaf.shape)} with {leaf.grad_fn.name()}. "
                "Put the computation into the model, or detach() the tensor"
            )
        elif leaf.dim() > 0:
            rows.append(leaf.size(0))
    for leaf in others:
        _refuse_other(leaf, rows)
    if not rows:
        raise SplitError(
            "the batch must hold a tensor with a dimension 0 to cut into microbatches, got none. "
            "Give inputs with one row for each sample"
        )
    if rows.count(rows[0]) < len(rows):
        raise _disagreement(tree, rows[0])
    if rows[0] == 0:
        raise SplitError("the batch must have at least 1 row, got 0. Skip empty batches")
    return rows[0]


def split(tree: Any, rows: Sequence[int]) -> list[Any]:
    """One tree per microbatch: tensors are cut along dimension 0, other leaves go to all."""
    if isinstance(tree, Tensor):
        # Tensor.split is a function in Python around this one.
        return list(tree.split_with_sizes(list(rows))) if tree.dim() > 0 else [tree] * len(rows)
    if type(tree) is tuple:
        columns = [split(part, rows) for part in tree]
        return list(zip(*columns, strict=True)) if columns else [()] * len(rows)
    if type(tree) is dict:
        if not tree:
            return [{} for _ in rows]
        return [dict(zip(tree, part, strict=True)) for part in split(tuple(tree.values()), rows)]
    leaves, spec = flatten(tree)
    if spec.is_leaf():
        return [tree] * len(rows)
    columns = split(tuple(leaves), rows)
    return [unflatten(list(column), spec) for column in columns]


def to_device(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on the device; tensors that are there stay the same objects.

    A copy from pinned memory to a GPU does not block: nobody may write to the source before the
    copy is done. A step on GPUs waits for that at its end (`is_pinned`).
    """
    if isinstance(tree, Tensor):
        # A copy to the CPU blocks, or the caller would read a tensor that has not arrived.
        return tree.to(device, non_blocking=device.type == "cuda")
    if type(tree) is tuple:
        return tuple(to_device(part, device) for part in tree)
    if type(tree) is dict:
        return {key: to_device(part, device) for key, part in tree.items()}
    leaves, spec = flatten(tree)
    if spec.is_leaf():
        return tree
    return unflatten([to_device(leaf, device) for leaf in leaves], spec)


def is_pinned(tree: Any) -> bool:
    """Whether a GPU may still read a tensor of the tree when the copy has been issued."""
    return any(isinstance(leaf, Tensor) and leaf.is_pinned() for leaf in leaves(tree))


def merge(parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """The inverse of `split`: tensors joined along dimension 0, equal other values kept.

    Tensors without dimensions, such as a loss that the model computes, become their weighted sum.

    Args:
        parts: the model's output for each microbatch.
        weights: one per microbatch.

    Raises:
        SplitError: the parts have different structures, or a value that is not a tensor differs
            from microbatch to microbatch.
    """
    if all(isinstance(part, Tensor) for part in parts):
        return _join(parts, weights)
    flat = [flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise SplitError(
            "the outputs of all microbatches must have one structure to be joined, got different "
            "ones. Return the same structure for each microbatch"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return unflatten([_join(column, weights) for column in columns], spec)


def _join(column: Sequence[Any], weights: Sequence[float]) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        if any(value.device != first.device for value in column):
            # The last stages of several replicas are on several GPUs.
            column = [value.to(first.device) for value in column]
        if first.dim() > 0:
            return torch.cat(tuple(column))
        if not first.is_floating_point():
            raise SplitError(
                "the model must return one row per sample, or a floating number, for each "
                f"microbatch, got a {first.dtype} without dimensions, which cannot be joined"
            )
        terms = [value * weight for value, weight in zip(column, weights, strict=True)]
        return sum(terms[1:], terms[0])
    if any(value != first for value in column):
        raise SplitError(
            "the model must return tensors, or values that are equal for all microbatches, got a "
            f"{type(first).__name__} that differs ({first!r} and others)"
        )
    return first


def _refuse_other(leaf: Any, rows: Sequence[int]) -> None:
    """Raises SplitError for an array, or an object with tensors, that has the rows of a batch."""
    if isinstance(leaf, PLAIN):
        return
    shape: Sequence[int] = getattr(leaf, "shape", ())
    if hasattr(leaf, "__array__") and len(shape) > 0 and (not rows or shape[0] == rows[0]):
        raise SplitError(
            f"arrays of a batch must be tensors, got a {type(leaf).__name__} of shape "
            f"{tuple(shape)}. Use torch.from_numpy(array)"
        )

    for tensor in _tensors_within(leaf, _DEPTH):
        if tensor.dim() > 0 and (not rows or tensor.size(0) == rows[0] > 1):
            raise SplitError(
                "tensors of a batch must be in tuples, lists, dicts, dataclasses or others that "
                f"torch.utils._pytree knows, got a {type(leaf).__name__} with shape "
                f"{tuple(tensor.shape)}. Pass its tensors, dict(...) of a mapping, or tables for "
                "all rows as buffers of the model"
            )


def _tensors_within(thing: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in an object of an unknown class, and in what it holds."""
    if isinstance(thing, Tensor):
        yield thing
    if depth == 0 or isinstance(thing, (*PLAIN, Tensor, nn.Module, type)) or callable(thing):
        return
    parts = [*getattr(thing, "__dict__", {}).values()]
    if isinstance(thing, dict | list | tuple):
        parts += thing.values() if isinstance(thing, dict) else thing
    # Larger ones are tables, such as vocabularies.
    for part in parts if len(parts) <= _MOST else ():
        yield from _tensors_within(part, depth - 1)


def _disagreement(tree: Any, rows: int) -> SplitError:
    """The error for the first tensor that has another number of rows than earlier tensors."""
    for path, leaf in with_paths(tree):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) != rows:
            # The name is written as in Python: target, inputs[0].
            name = re.sub(r"^(\['named'\])?\['(\w+)'\]", r"\2", path)
            return SplitError(
                f"{name} must have as many rows in dimension 0 as the tensors before it have, "
                f"{rows}, got {leaf.size(0)} (shape {tuple(leaf.shape)}). Give one row for each "
                "sample"
            )
    raise AssertionError("all tensors agree")

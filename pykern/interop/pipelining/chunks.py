"""Batches cut into microbatches and put together again, by torch's own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.utils import _pytree as pytree

from ...runtime import microbatch

Positional = list[tuple[Any, ...]]
Keywords = list[dict[str, Any]]


def split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> tuple[Positional, Keywords]:
    """Arguments of each microbatch: tensors cut on the dimension that a spec gives, else on 0.

    Larger parts come first. What is no tensor goes to every microbatch.

    Raises:
        ValueError: a spec is not for these arguments, or a tensor cannot be cut into so many.
    """
    if args_spec is not None and args and len(args_spec) != len(args):
        raise ValueError(
            f"args_chunk_spec has {len(args_spec)} entries for {len(args)} positional arguments"
        )
    if kwargs_spec is not None and kwargs and kwargs_spec.keys() != kwargs.keys():
        raise ValueError(
            f"kwargs_chunk_spec is for {sorted(kwargs_spec)}, but step got {sorted(kwargs)}"
        )
    by_default = (args if args_spec is None else (), kwargs if kwargs_spec is None else {})
    for path, leaf in pytree.tree_flatten_with_path(by_default)[0]:
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            raise ValueError(
                f"tensor {pytree.keystr(path)} of (args, kwargs) has no dimension to cut into "
                "microbatches; give a Python number"
            )
    # torch looks at no spec where there is nothing to cut.
    parts, keywords = split_args_kwargs_into_chunks(
        args,
        dict(kwargs),
        num_microbatches,
        None if args_spec is None else tuple(args_spec),
        None if kwargs_spec is None else dict(kwargs_spec),
    )
    if len(parts) != num_microbatches:
        raise ValueError(
            f"n_microbatches is {num_microbatches}, but a tensor of the batch has only "
            f"{len(parts)} rows in the dimension that is cut; each microbatch needs one"
        )
    return parts, keywords


def split_target(target: Any, num_microbatches: int) -> list[Any]:
    """The target of each microbatch, cut on dimension 0."""
    return [part for (part,) in split((target,), {}, num_microbatches)[0]]


def merge(outputs: Sequence[Any], spec: Any) -> Any:
    """The outputs of all microbatches as one, by the spec, else joined along dimension 0.

    Without a spec, a tensor that has no dimensions becomes the mean.
    """
    if spec is None:
        return microbatch.merge(outputs, [1 / len(outputs)] * len(outputs))
    return merge_chunks(list(outputs), spec)


__all__ = ["TensorChunkSpec", "merge", "split", "split_target"]

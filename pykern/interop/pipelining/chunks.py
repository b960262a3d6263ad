"""Batches cut into microbatches and put together again, by torch's own rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from ...runtime import microbatch
from ...tensors.trees import with_paths

PositionalChunks = list[tuple[Any, ...]]
KeywordChunks = list[dict[str, Any]]


class ChunkSpecs(NamedTuple):
    """How arguments are cut and outputs joined, as `split` and `merge` take it."""

    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    outputs: Any


@dataclass(frozen=True)
class StepArguments:
    """The arguments and the target of a step, each whole or pre-split (`_mbs`)."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    arg_mbs: Any
    kwarg_mbs: Any
    target_mbs: Any

    @property
    def has_target(self) -> bool:
        """Whether the batch has a target for the loss function."""
        return self.target is not None or self.target_mbs is not None

    def arguments(
        self, num_microbatches: int, specs: ChunkSpecs
    ) -> tuple[PositionalChunks, KeywordChunks]:
        """The arguments of each microbatch; see `split`.

        Raises:
            ValueError: the batch cannot be split, is given both whole and pre-split, or is
                pre-split into another number of microbatches.
            TypeError: `arg_mbs` is not a list of tuples, or `kwarg_mbs` is not a list of dicts.
        """
        given_cut = {
            name: given
            for name in ("arg_mbs", "kwarg_mbs", "target_mbs")
            if (given := getattr(self, name)) is not None
        }
        if not given_cut:
            return split(self.args, self.kwargs, num_microbatches, specs.args, specs.kwargs)
        if self.args or self.kwargs or self.target is not None:
            raise ValueError(
                f"a batch must be given either whole or pre-split, got {', '.join(given_cut)} and "
                "whole arguments or a whole target. Pass the whole batch in arg_mbs, kwarg_mbs and "
                "target_mbs"
            )
        for name, given in given_cut.items():
            _require_cut(name, given, num_microbatches)
        return (
            self.arg_mbs or [()] * num_microbatches,
            self.kwarg_mbs or [{} for _ in range(num_microbatches)],
        )

    def targets(self, num_microbatches: int) -> list[Any]:
        """The target of each microbatch, cut on dimension 0, where there are targets."""
        if self.target_mbs is not None:
            return list(self.target_mbs)
        parts, _ = split((self.target,), {}, num_microbatches)
        return [part for (part,) in parts]


def _require_cut(name: str, given: Any, num_microbatches: int) -> None:
    """Raises TypeError or ValueError if a pre-split argument has a wrong type or length."""
    if not isinstance(given, list):
        raise TypeError(f"{name} must be a list, got {type(given).__name__}")
    if len(given) != num_microbatches:
        raise ValueError(
            f"{name} must have an entry for each of {num_microbatches} microbatches, got "
            f"{len(given)}"
        )
    kind = {"arg_mbs": tuple, "kwarg_mbs": dict}.get(name, object)
    for number, each in enumerate(given):
        if not isinstance(each, kind):
            raise TypeError(
                f"{name} must be a list of {kind.__name__}s, got {type(each).__name__} for "
                f"microbatch {number}"
            )


def split(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> tuple[PositionalChunks, KeywordChunks]:
    """Arguments of each microbatch: tensors cut on the dimension that a spec gives, else on 0.

    Larger parts come first. Arguments that are not tensors go to every microbatch.

    Raises:
        ValueError: a spec is not for these arguments, or a tensor cannot be cut into so many.
    """
    if args_spec is not None and args and len(args_spec) != len(args):
        raise ValueError(
            f"args_chunk_spec must have an entry for each of {len(args)} positional arguments, got "
            f"{len(args_spec)}"
        )
    if kwargs_spec is not None and kwargs and kwargs_spec.keys() != kwargs.keys():
        raise ValueError(
            f"kwargs_chunk_spec must be for the arguments of step, {sorted(kwargs)}, got "
            f"{sorted(kwargs_spec)}"
        )
    by_default = (args if args_spec is None else (), kwargs if kwargs_spec is None else {})
    for path, leaf in with_paths(by_default):
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            raise ValueError(
                f"tensor {path} of (args, kwargs) must have a dimension to cut into microbatches, "
                "got a tensor without dimensions. Give a Python number"
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
            f"n_microbatches must be at most {len(parts)}, the rows of a tensor of the batch in "
            f"the dimension that is cut, got {num_microbatches}. Use fewer microbatches"
        )
    return parts, keywords


def merge(outputs: Sequence[Any], spec: Any) -> Any:
    """The outputs of all microbatches as one, by the spec, else joined along dimension 0.

    Without a spec, a tensor that has no dimensions becomes the mean.
    """
    if spec is None:
        return microbatch.merge(outputs, [1 / len(outputs)] * len(outputs))
    return merge_chunks(list(outputs), spec)

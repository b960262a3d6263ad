"""Two tensors, or two trees of them, compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tensors.trees import flatten, with_paths


@dataclass(frozen=True)
class Bounds:
    """The tolerances of a comparison, as in `Verify`."""

    rtol: float = 0.0
    atol: float = 0.0

    def hold(self, ours: Tensor, plain: Tensor) -> Tensor:
        """A mask of the values that agree, for tensors of the same shape and dtype."""
        return torch.isclose(ours, plain, rtol=self.rtol, atol=self.atol, equal_nan=True)

    def or_wider(self, other: Bounds) -> Bounds:
        """The wider of both."""
        return Bounds(max(self.rtol, other.rtol), max(self.atol, other.atol))


@dataclass(frozen=True)
class Difference:
    """A difference between a pipeline's step and the plain model, in one tensor or value.

    Attributes:
        kind: "loss", "output", "gradient", "buffer" or "random numbers".
        name: of the parameter or buffer, as the model has it, or the place in the output.
        how: in words: how many values differ and by how much, or which tensor is absent.
        num_values: how many values differ; 0 where the tensors cannot be compared value by value.
        max_abs: the largest absolute difference; NaN where either value of a pair is NaN.
        max_rel: the largest difference relative to the plain model's value.
    """

    kind: str
    name: str
    how: str
    num_values: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    def __str__(self) -> str:
        """The kind, the name and the words."""
        name = f" {self.name!r}" if self.name else ""
        return f"{self.kind}{name}: {self.how}"


def compare(
    kind: str, name: str, ours: Tensor | None, plain: Tensor | None, bounds: Bounds
) -> Difference | None:
    """The difference of two tensors; None if they agree."""
    if ours is None or plain is None:
        if ours is plain:
            return None
        whose = "the plain model's is absent" if plain is None else "the pipeline's is absent"
        return Difference(kind, name, whose)
    for what in ("layout", "dtype", "shape"):
        mine, theirs = getattr(ours, what), getattr(plain, what)
        if mine != theirs:
            return Difference(kind, name, f"{what} {_shown(mine)}, plain {_shown(theirs)}")
    ours, plain = _dense(ours), _dense(plain).to(ours.device)
    if torch.equal(ours, plain):
        return None
    wrong = ~bounds.hold(ours, plain)
    count = int(wrong.sum())
    if count == 0:
        return None
    return _difference(kind, name, ours[wrong], plain[wrong], ours.numel())


def compare_trees(kind: str, ours: Any, plain: Any, bounds: Bounds) -> Iterator[Difference]:
    """The differences of two trees, leaf by leaf."""
    theirs, other = flatten(plain)
    _, spec = flatten(ours)
    if spec != other:
        yield Difference(kind, "", f"structure {spec}, plain {other}")
        return
    for (name, one), two in zip(with_paths(ours), theirs, strict=True):
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            found = compare(kind, name, one, two, bounds)
            if found is not None:
                yield found
        elif type(one) is not type(two) or one != two:
            yield Difference(kind, name, f"{one!r}, plain {two!r}")


def compare_named(
    kind: str,
    ours: Mapping[str, Tensor | None],
    plain: Mapping[str, Tensor | None],
    bounds: Bounds,
) -> Iterator[Difference]:
    """The differences of tensors of the same names, in the order of the names."""
    for name, one in ours.items():
        found = compare(kind, name, one, plain.get(name), bounds)
        if found is not None:
            yield found


def _difference(kind: str, name: str, ours: Tensor, plain: Tensor, total: int) -> Difference:
    """The difference of two tensors, given the values that differ."""
    dtype = torch.complex128 if ours.is_complex() else torch.float64
    ours, plain = ours.to(dtype), plain.to(dtype)
    apart = (ours - plain).abs()
    max_abs, max_rel = float(apart.max()), float((apart / plain.abs()).max())
    how = f"{ours.numel()} of {total} values differ, by {max_abs:.3g} at most"
    if math.isfinite(max_rel):
        how += f" ({max_rel:.3g} of the plain value)"
    return Difference(kind, name, how, ours.numel(), max_abs, max_rel)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()


def _shown(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)

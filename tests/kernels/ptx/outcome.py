"""The arguments of an operation in some layout, and how near its results are to float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.acceptance import assert_accepted, padded, ulp


class Shape(NamedTuple):
    """Sizes of arguments.

    Attributes:
        rows: tokens.
        hidden: columns of norms, dropout and residuals.
        inner: columns of the product of gate and up.
        classes: columns of logits.
        padding: elements between rows.
        offset: elements before the first row.
    """

    rows: int
    hidden: int
    inner: int
    classes: int
    padding: int = 0
    offset: int = 0


# Llama 3 8B, cut in rows; sizes that nothing divides; rows that are not adjacent; no rows.
SHAPES = {
    "llama": Shape(4, 4096, 14336, 128256),
    "odd": Shape(5, 1001, 333, 5003),
    "padded": Shape(3, 1000, 520, 4104, padding=7, offset=3),
    "empty": Shape(0, 1000, 520, 4104),
    # Fewer classes than four warps have threads, and than one has.
    "few": Shape(4, 1000, 520, 53),
    "fewest": Shape(4, 1000, 520, 5),
}


@dataclass
class Given:
    """The shape and dtype of arguments."""

    shape: Shape
    dtype: torch.dtype

    def rows(self, columns: int, num_rows: int | None = None, scale: float = 1.0) -> Tensor:
        """Random numbers in the layout of the shape; NaN lies between rows."""
        num_rows = self.shape.rows if num_rows is None else num_rows
        values = (torch.randn(num_rows, columns) * scale).to(self.dtype)
        return padded(values, self.shape.padding, self.shape.offset)

    def row(self, columns: int) -> Tensor:
        return torch.randn(columns).to(self.dtype)


@dataclass
class Outcome:
    """Results of an operation.

    Attributes:
        inputs: tensors that any implementation must read once.
        outputs: tensors that it must write once.
        worst: the largest error by dtype of results, in its ulps.
    """

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)

    def near(self, actual: Tensor, exact: Tensor, terms: Tensor, factor: float = 8.0) -> None:
        """Half an ulp, and some roundings of float32; see `assert_accepted`.

        The ulp of `worst` is that of the result, or of what it is added up from, if that is larger.
        """
        exact, terms = exact.detach(), terms.detach()
        assert_accepted(actual, exact, terms, factor)
        if actual.numel():
            unit = ulp(torch.maximum(exact.abs(), terms), actual.dtype)
            error = ((actual.double() - exact).abs() / unit).max().item()
            dtype = str(actual.dtype).removeprefix("torch.")
            self.worst[dtype] = max(self.worst.get(dtype, 0.0), error)
        self.outputs.append(actual)

    def same(self, actual: Tensor, promised: Tensor) -> None:
        """Equal bits; a NaN equals any NaN."""
        assert (actual.dtype, actual.shape) == (promised.dtype, promised.shape)
        one, other = (_bits(x) for x in (actual, promised))
        num_different = int((one != other).sum())
        assert not num_different, f"{num_different} of {one.numel()} bits differ"
        self.outputs.append(actual)

    @property
    def least_bytes(self) -> int:
        """Bytes that any implementation moves."""
        return sum(x.numel() * x.element_size() for x in (*self.inputs, *self.outputs))


def _bits(x: Tensor) -> Tensor:
    if x.is_floating_point():
        x = torch.where(x.float().isnan(), torch.zeros((), dtype=x.dtype), x)
    return x.contiguous().view(-1).view(torch.uint8)


Operation = Callable[[Given], Outcome]

"""When a result in low precision is right, and tensors that show accesses outside of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic as _deterministic

deterministic: Any = _deterministic

_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_CANARY = 0x5A


def assert_accepted(actual: Tensor, exact: Tensor, terms: Tensor, factor: float = 4.0) -> None:
    """|actual - exact| <= 0.5 ulp of its type + factor * float32's epsilon * the sum of |terms|.

    Args:
        actual: what a kernel or twin computed.
        exact: the same in float64.
        terms: of that shape, the sum of the absolute values of what is added up for each element.
        factor: how many roundings of float32 the longest way to an element has.
    """
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape
    allowed = 0.5 * ulp(exact, actual.dtype) + factor * 2.0**-23 * terms
    excess = (actual.double() - exact).abs() - allowed
    worst = excess.max().item() if excess.numel() else 0.0
    assert worst <= 0, f"off by {worst} more than allowed, at {excess.argmax().item()}"
    assert not torch.isnan(actual).any()


def assert_backward_repeats(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """A backward changes nothing that it is given, and gives the same when it comes again."""
    incoming = [torch.randn_like(result) for result in results]
    before = [tensor.clone() for tensor in (*results, *incoming)]
    first, second = (
        torch.autograd.grad(results, inputs, incoming, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, (*results, *incoming), before))


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of a type near the values, in float64."""
    _, exponents = torch.frexp(values)
    lowest = torch.finfo(dtype).smallest_normal
    smallest = torch.frexp(torch.tensor(lowest, dtype=torch.float64))[1]
    return torch.ldexp(
        torch.ones_like(values), exponents.clamp(min=int(smallest)) - 1 - _MANTISSA_BITS[dtype]
    )


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Within it whatever torch.empty and the like return holds NaN, or the largest integer."""
    before = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


def padded(values: Tensor, padding: int, offset: int) -> Tensor:
    """The same values in a tensor of other strides: NaN around and between its rows.

    Args:
        values: floating.
        padding: elements behind each row.
        offset: elements before the first.
    """
    *rows, columns = values.shape
    width = columns + padding
    num_rows = values.numel() // columns if columns else 0
    room = values.new_full((offset + num_rows * width + padding,), float("nan"))
    matrix = room[offset : offset + num_rows * width].view(num_rows, width)[:, :columns]
    matrix.copy_(values.reshape(num_rows, columns))
    strides = [width]
    for size in reversed(rows[1:]):
        strides.insert(0, strides[0] * size)
    return room.as_strided(values.shape, [*strides[: len(rows)], 1], offset)


class Canaries:
    """Memory whose surroundings are known, handed out by `empty` in place of torch.empty."""

    def __init__(self) -> None:
        self._rooms: list[tuple[Tensor, int, int]] = []

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: object = None) -> Tensor:
        """As torch.empty: NaN where it can be, between two walls."""
        del device
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        room = torch.full((num_bytes + 512,), _CANARY, dtype=torch.uint8)
        self._rooms.append((room, 256, 256 + num_bytes))
        inside = room[256 : 256 + num_bytes].view(dtype).view(list(shape))
        return inside.fill_(float("nan")) if dtype.is_floating_point else inside

    def check(self) -> None:
        """Raises where a wall was written to."""
        for room, start, end in self._rooms:
            assert (room[:start] == _CANARY).all()
            assert (room[end:] == _CANARY).all()

"""Moves tensors from a stage to others, and out of the pipeline; connects stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .stage import Stage


# Methods of `Transport`.
There = Callable[[int, int, Sequence[Tensor]], Sequence[Tensor]]
Back = Callable[[int, int, Sequence[Tensor | None]], Sequence[Tensor | None]]
Arrive = Callable[[Sequence[Tensor]], Sequence[Tensor]]
TakeIn = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class Transport:
    """The transport of a stage if all stages share one memory: no tensor has to move.

    Other transports move tensors into memory that is reused.
    """

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that the later stage `reader` gets for these detached outputs."""
        del microbatch, reader
        return outputs

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The tensors that the earlier stage `maker` gets for these gradients of its outputs."""
        del microbatch, maker
        return gradients

    def arrive(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values from a stage that is not the previous one, in memory that the stage may keep."""
        return values

    def take_in(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients for this stage, in memory that its backward may keep."""
        return gradients

    def keep(self, output: Any) -> Any:
        """An output that leaves the pipeline, in memory that its caller may keep."""
        return output


def connect(stages: Sequence[Stage]) -> None:
    """Connects the stages of one replica with each other."""
    for stage, following in pairwise(stages):
        stage.next, following.previous = following, stage
    for stage in stages:
        stage.parcels.of_stages = [other.parcels for other in stages]

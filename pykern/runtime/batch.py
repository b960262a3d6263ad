"""What a step is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import microbatch
from .loss import Losses
from .recompute import Level
from .stage import Finish


@dataclass(frozen=True)
class Batch:
    """One batch and what becomes of it.

    Attributes:
        inputs: arguments of the first layer, for all rows.
        target: of the loss, for all rows; None where there is none.
        rows: how many of them each microbatch has.
        finish: called in the last stage with each microbatch and its output; returns where backward
            starts. `Losses` in a training step.
        levels: by stage and microbatch, how it is recomputed, None where it is not; empty where
            nothing is.
    """

    inputs: tuple[Any, ...]
    target: Any
    rows: Sequence[int]
    finish: Losses | Finish
    levels: Sequence[Sequence[Level | None]] = ()

    def arguments(self) -> list[tuple[Any, ...] | None]:
        """What the first layer is called with, per microbatch; None for one without rows."""
        parts = microbatch.split(self.inputs, self.rows)
        return [part if rows else None for part, rows in zip(parts, self.rows, strict=True)]


class Outputs:
    """Takes what the last stage returns, and starts no backward.

    Attributes:
        parts: by microbatch.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Any] = {}

    def __call__(self, index: int, output: Any, _: bool) -> tuple[tuple[()], tuple[()]]:
        """Takes the output of a microbatch."""
        self.parts[index] = output
        return (), ()

    def merged(self) -> Any:
        """The output for the whole batch."""
        return microbatch.merge([self.parts[index] for index in sorted(self.parts)])

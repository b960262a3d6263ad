"""What a stage has left of its forwards for backwards that are run later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..random.seed import StepSeed
from ..recompute.cell import Cell
from ..recompute.recompute import Level
from .settings import Settings
from .skips import Parcel
from .stage import Finish, Stage


@dataclass(frozen=True)
class Left:
    """The graphs of a stage's forwards, and what else its backwards and R need of them.

    Attributes:
        layers: what it ran with, maybe copies.
        settings: of its layers.
        keywords, outputs, leaves: as in the stage, by microbatch.
        opened, sent: of the stage's parcels.
        cells: by microbatch, where it is recomputed.
    """

    layers: Sequence[nn.Module]
    settings: Settings | None
    keywords: Sequence[dict[str, Any]]
    outputs: list[Sequence[Tensor]]
    leaves: list[Sequence[Tensor]]
    opened: dict[int, list[Parcel]]
    sent: dict[int, list[Parcel]]
    cells: dict[int, Cell]


def leave(stage: Stage) -> Left:
    """Takes it, at the end of the forwards."""
    return Left(
        stage.layers,
        stage.settings,
        stage.keywords,
        stage.outputs,
        stage.leaves,
        dict(stage.parcels.opened),
        dict(stage.parcels.sent),
        stage.recomputed.leave(),
    )


def resume(stage: Stage, left: Left, finish: Finish, levels: Sequence[Level | None]) -> None:
    """Has the stage begin a step with what it has left, of which nothing may be used again.

    Raises:
        RuntimeError: R would do something else than F has done.
    """
    stage.begin(len(left.outputs), StepSeed(), finish, levels)
    if left.cells and stage.settings is not left.settings:
        raise RuntimeError(
            f"layers of stage {stage.index} have changed (train or eval mode, hooks, numbers) "
            "since the forward, which recompute would run again as they are now: change them "
            "after the backward, or do without recompute"
        )
    stage.layers = left.layers
    stage.outputs[:], stage.leaves[:] = left.outputs, left.leaves
    stage.parcels.opened.update(left.opened)
    stage.parcels.sent.update(left.sent)
    stage.recomputed.resume(left.cells)
    stage.name(left.keywords)

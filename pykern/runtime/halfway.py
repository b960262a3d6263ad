"""The state of stages between their forwards and backwards that run later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .batch import Batch
from .random.seed import StepSeed
from .recompute.recompute import KeptMicrobatch
from .stage.settings import Settings
from .stage.stage import Stage
from .stage.ties import Ties
from .through import GraphEnds


@dataclass(frozen=True)
class _OfStage:
    """The graphs of a stage's forwards, and other state that its backwards and R need.

    Attributes:
        layers: the layers that ran, maybe copies.
        settings: of its layers at the end of the forwards; None if nothing is recomputed.
        values: as in the stage.
        keywords, outputs, leaves: as in the stage, by microbatch.
        opened: of the stage's parcels.
        cells: by microbatch, the state that R needs.
        moved: of the stage's parcels, until the backwards end.
    """

    layers: Sequence[nn.Module]
    settings: Settings | None
    values: tuple[object, ...]
    keywords: Sequence[dict[str, Any]]
    outputs: list[Sequence[Tensor]]
    leaves: list[Sequence[Tensor]]
    opened: dict[int, list[tuple[int, int]]]
    cells: dict[int, KeptMicrobatch]
    moved: Sequence[Sequence[Tensor]]

    def let_go(self) -> None:
        """Drops these references; the stage frees the objects microbatch by microbatch."""
        for held in (self.outputs, self.leaves, self.opened, self.cells):
            held.clear()


class Halfway:
    """State that is taken out of a step of forwards before it ends.

    Args:
        stages: of one replica.
        ties: the parameters that the stages share.
    """

    def __init__(self, stages: Sequence[Stage], ties: Ties) -> None:
        self._stages = stages
        self._ties = ties
        self._pairs = ties.leave()
        self._of_stages = [
            _OfStage(
                stage.layers,
                stage.settings.now() if stage.settings and stage.recomputed.in_use else None,
                stage.values,
                stage.keywords,
                stage.outputs,
                stage.leaves,
                dict(stage.parcels.opened),
                stage.recomputed.leave(),
                list(stage.parcels.moved),
            )
            for stage in stages
        ]

    @property
    def recomputes(self) -> bool:
        """Whether a backward runs layers again."""
        return any(of_stage.cells for of_stage in self._of_stages)

    def resume(self, batch: Batch) -> None:
        """Has the stages begin a step of backwards. May be called once.

        Args:
            batch: its `finish` has the gradients that the last stage begins with; its levels are
                the levels of the forwards.

        Raises:
            RuntimeError: layers have changed, so that R would not repeat F.
        """
        for stage, left in zip(self._stages, self._of_stages, strict=True):
            levels = batch.levels[stage.index] if batch.levels else ()
            stage.values = left.values
            stage.begin(len(left.outputs), StepSeed(), batch.finish, levels)
            if left.cells and stage.settings != left.settings:
                raise RuntimeError(
                    f"layers of stage {stage.index} have changed (train or eval mode, hooks, "
                    "numbers) since the forward, which recompute would run again as they are now. "
                    "Change them after the backward, or do without recompute"
                )
            stage.layers = left.layers
            stage.outputs[:], stage.leaves[:] = left.outputs, left.leaves
            stage.parcels.opened.update(left.opened)
            stage.recomputed.resume(left.cells)
            stage.name(left.keywords)
            left.let_go()
        assert isinstance(batch.finish, GraphEnds)
        for microbatch, given in batch.finish.gradients.items():
            self._stages[-1].gradients[microbatch] = given
        self._ties.resume(self._pairs)

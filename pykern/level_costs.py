"""What each recompute level costs a stage in time and memory, as the planner is told.

A level of the kernels (`none`, `ops`, `ops+stash`) says what F keeps for B. With `layer` and
`stage` it keeps inputs only, and R makes the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .plan import Costs, Memory


@dataclass(frozen=True)
class Kept:
    """One microbatch on one stage at a level of the kernels.

    Attributes:
        forward_ns: of F.
        backward_ns: of B, or of I and W together.
        activation_bytes: held from F to the end of B or I.
        weights_bytes: of it, or beside it, what is held from I to the end of W.
        input_share: of backward_ns, what I takes, 0...1.
    """

    forward_ns: float
    backward_ns: float
    activation_bytes: float
    weights_bytes: float = 0.0
    input_share: float = 0.5


@dataclass(frozen=True)
class Rebuilt:
    """One microbatch on one stage at a level that R belongs to.

    Attributes:
        recompute_ns: of R.
        boundary_bytes: held from F to R.
        activation_bytes: held from R to the end of B or I.
    """

    recompute_ns: float
    boundary_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class StageLevel:
    """What a stage does: the level of its kernels, and which microbatches are recomputed and how.

    Attributes:
        kept: the level of the kernels.
        rebuilt: `layer` or `stage`; None where nothing is recomputed.
        microbatches: those that are recomputed, unless their B or I follows right behind their F.
    """

    kept: str
    rebuilt: str | None = None
    microbatches: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StageCosts:
    """One stage at every level that it can have.

    Attributes:
        kept: by level of the kernels.
        rebuilt: by `layer` and `stage`; empty for a stage that cannot be recomputed.
        workspace_bytes: the most that an action needs beyond what is held before or after it.
        gradient_bytes: of its input; held from B or I to the end of the previous stage's.
    """

    kept: Mapping[str, Kept]
    rebuilt: Mapping[str, Rebuilt]
    workspace_bytes: float = 0.0
    gradient_bytes: float = 0.0

    def activation_bytes(self, level: StageLevel) -> float:
        """Of a microbatch whose graph is there, recomputed or not: the larger of the two."""
        kept = self.kept[level.kept].activation_bytes
        if level.rebuilt is None:
            return kept
        return max(kept, self.rebuilt[level.rebuilt].activation_bytes)


def costs_of(stages: Sequence[StageCosts], levels: Sequence[StageLevel]) -> Costs:
    """What the actions of the stages take at these levels."""
    kept = [stage.kept[level.kept] for stage, level in zip(stages, levels, strict=True)]
    return Costs(
        [cost.forward_ns for cost in kept],
        [cost.backward_ns for cost in kept],
        recompute_ns=[
            stage.rebuilt[level.rebuilt].recompute_ns if level.rebuilt else 0.0
            for stage, level in zip(stages, levels, strict=True)
        ],
        input_ns=[cost.backward_ns * cost.input_share for cost in kept],
        weight_ns=[cost.backward_ns * (1 - cost.input_share) for cost in kept],
    )


def memory_of(stages: Sequence[StageCosts], levels: Sequence[StageLevel]) -> Memory:
    """What the stages hold at these levels."""
    kept = [stage.kept[level.kept] for stage, level in zip(stages, levels, strict=True)]
    return Memory(
        [stage.activation_bytes(level) for stage, level in zip(stages, levels, strict=True)],
        [cost.weights_bytes for cost in kept],
        [
            stage.rebuilt[level.rebuilt].boundary_bytes if level.rebuilt else 0.0
            for stage, level in zip(stages, levels, strict=True)
        ],
    )

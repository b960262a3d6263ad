"""What each recompute level costs a stage in time and memory, as the planner is told.

A level of the kernels (`none`, `ops`, `ops+stash`) says what F keeps for B. With `layer` and
`stage` it keeps inputs only, and R makes the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import Costs, Kind, Memory

# The kinds that free the activations of F and R.
BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that one microbatch of a stage holds, by the action that changes them.

    Attributes:
        own: by kind of the stage's action, how much more is held behind it.
        beside: likewise, what the action needs beyond what is held before and behind it.
        others: by kind and stage of another stage's action, how much more is held behind that:
            less, for it lets go of what the two have in common.
    """

    own: Mapping[Kind, float]
    beside: Mapping[Kind, float]
    others: Mapping[tuple[Kind, int], float]


@dataclass(frozen=True)
class LevelCost:
    """One microbatch on one stage at a level of the kernels.

    Attributes:
        forward_ns: of F.
        backward_ns: of B, or of I and W together.
        activation_bytes: held from F to the end of B or I.
        weights_bytes: of it, or beside it, what is held from I to the end of W.
        input_share: of backward_ns, what I takes, 0...1.
        held: all of it action by action, where it was measured.
    """

    forward_ns: float
    backward_ns: float
    activation_bytes: float
    weights_bytes: float = 0.0
    input_share: float = 0.5
    held: HeldBytes | None = None


@dataclass(frozen=True)
class Rebuilt:
    """One microbatch on one stage at a level that R belongs to.

    Attributes:
        recompute_ns: of R.
        boundary_bytes: held from F to R.
        activation_bytes: held from R to the end of B or I.
        backward_ns: by how much B, or I, is longer.
        held: all of it action by action, where it was measured.
    """

    recompute_ns: float
    boundary_bytes: float
    activation_bytes: float
    backward_ns: float = 0.0
    held: HeldBytes | None = None


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
        step_bytes: held for all of a step, whatever its levels.
        handed_bytes: of what F hands to the stage behind.
    """

    kept: Mapping[str, LevelCost]
    rebuilt: Mapping[str, Rebuilt]
    workspace_bytes: float = 0.0
    gradient_bytes: float = 0.0
    step_bytes: float = 0.0
    handed_bytes: float = 0.0


def costs_of(
    stages: Sequence[StageCosts], levels: Sequence[StageLevel], num_microbatches: int
) -> Costs:
    """What the actions of the stages take at these levels.

    Where some microbatches of a stage have longer backwards, all take the mean.
    """
    forward, recompute, inputs, weights = [], [], [], []
    for stage, level in zip(stages, levels, strict=True):
        kept, rebuilt = stage.kept[level.kept], stage.rebuilt.get(level.rebuilt or "")
        longer = rebuilt.backward_ns * len(level.microbatches) / num_microbatches if rebuilt else 0
        forward.append(kept.forward_ns)
        recompute.append(rebuilt.recompute_ns if rebuilt else 0.0)
        inputs.append(kept.backward_ns * kept.input_share + longer)
        weights.append(kept.backward_ns * (1 - kept.input_share))
    whole = [i + w for i, w in zip(inputs, weights, strict=True)]
    return Costs(forward, whole, recompute_ns=recompute, input_ns=inputs, weight_ns=weights)


def memory_of(
    stages: Sequence[StageCosts],
    levels: Sequence[StageLevel],
    shares: Sequence[float] | None = None,
) -> Memory:
    """The bytes per stage at these levels, each multiplied by the share of its stage if given."""
    activation, weights, boundary, rebuilt_bytes = [], [], [], []
    for stage, level, share in zip(stages, levels, shares or [1.0] * len(stages), strict=True):
        kept, rebuilt = stage.kept[level.kept], stage.rebuilt.get(level.rebuilt or "")
        activation.append(share * kept.activation_bytes)
        weights.append(share * kept.weights_bytes)
        boundary.append(share * (rebuilt.boundary_bytes if rebuilt else 0.0))
        whole = rebuilt.activation_bytes if rebuilt else kept.activation_bytes
        rebuilt_bytes.append(share * whole)
    return Memory(activation, weights, boundary, rebuilt_bytes)

"""The costs of a stage in time and memory at each recompute level, as the planner takes them.

A level of the kernels (`none`, `ops`, `ops+stash`) determines what F keeps for B. With `layer` and
`stage`, F keeps inputs only, and R computes the rest again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import Costs, Kind, Memory
from ..runtime.recompute.recompute import INPUTS, Level

# The kinds that free the activations of F and R.
BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that one microbatch of a stage holds, by the action that changes them.

    Attributes:
        own: by kind of the stage's action, how much more is held after the action.
        beside: by kind, the bytes that the action needs beyond those held before and after it.
        others: by kind and stage of another stage's action, how much more is held after that
            action; negative, because it releases tensors that both stages hold.
    """

    own: Mapping[Kind, float]
    beside: Mapping[Kind, float]
    others: Mapping[tuple[Kind, int], float]


@dataclass(frozen=True)
class LevelCost:
    """One microbatch on one stage at a level of the kernels.

    Attributes:
        forward_ns: the time of F.
        backward_ns: the time of B, or of I and W together.
        activation_bytes: the bytes held from F to the end of B or I.
        weights_bytes: the bytes held from I to the end of W, part of activation_bytes or not.
        input_share: the share of backward_ns that I takes, 0...1.
        held: the bytes action by action, if they were measured.
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
        recompute_ns: the time of R.
        boundary_bytes: the bytes held from F to R.
        activation_bytes: the bytes held from R to the end of B or I.
        backward_ns: the additional time of B, or I.
        held: the bytes action by action, if they were measured.
    """

    recompute_ns: float
    boundary_bytes: float
    activation_bytes: float
    backward_ns: float = 0.0
    held: HeldBytes | None = None


@dataclass(frozen=True)
class StageLevel:
    """The levels of a stage: that of its kernels, and that of its recomputed microbatches.

    Attributes:
        kept: the level of the kernels.
        rebuilt: `layer` or `stage`; None if nothing is recomputed.
        microbatches: the recomputed microbatches, except if B or I follows right behind F.
    """

    kept: str
    rebuilt: str | None = None
    microbatches: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StageCosts:
    """One stage at every level that it can have.

    Attributes:
        kept: the costs by level of the kernels.
        rebuilt: the costs of `layer` and `stage`; empty for a stage that cannot be recomputed.
        workspace_bytes: the most bytes that an action needs beyond those held before or after it.
        gradient_bytes: the bytes of the input's gradient, which is held from B or I to the end of
            the previous stage's B or I.
        step_bytes: the bytes held for a whole step, at all levels.
        handed_bytes: the bytes that F hands to the next stage.
    """

    kept: Mapping[str, LevelCost]
    rebuilt: Mapping[str, Rebuilt]
    workspace_bytes: float = 0.0
    gradient_bytes: float = 0.0
    step_bytes: float = 0.0
    handed_bytes: float = 0.0


def levels_of_stages(num_stages: int, levels: Sequence[Sequence[Level | None]]) -> list[StageLevel]:
    """The levels of each stage in a step; "ops" where its forwards have none."""
    found = []
    for stage in range(num_stages):
        of_stage = list(levels[stage]) if levels else []
        rebuilt = [level for level in of_stage if level in INPUTS]
        kept = [level for level in of_stage if level is not None and level not in INPUTS]
        again = frozenset(number for number, level in enumerate(of_stage) if level in INPUTS)
        found.append(StageLevel(kept[0] if kept else "ops", rebuilt[0] if rebuilt else None, again))
    return found


def costs_of(
    stages: Sequence[StageCosts], levels: Sequence[StageLevel], num_microbatches: int
) -> Costs:
    """The costs of the stages' actions at these levels.

    If some microbatches of a stage have longer backwards, all backwards get the mean time.
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

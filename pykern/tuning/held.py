"""Measures the bytes that each unit of a model holds, and what two neighbours hold together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ..budget.level_costs import HeldBytes, StageCosts
from ..budget.measure import StageTrials
from ..columns import counted
from ..notes import add_note
from ..plan import Kind
from ..runtime.loss import Losses
from ..runtime.recompute.recompute import Level
from ..runtime.stage.stage import Stage
from ..trace.routes import everywhere
from .asked import Asked
from .by_unit import even_spans
from .measurements import Measurements, Table

LEVELS: tuple[Level, ...] = ("ops", "layer", "stage")
# Backwards in one action, and in two.
FORMS = {"B": (Kind.B,), "IW": (Kind.I, Kind.W)}


def kinds_of(form: str) -> tuple[Kind, ...]:
    """The kinds of actions with this form of backwards."""
    return (Kind.F, Kind.R, *FORMS[form])


def levels_for(asked: Asked) -> tuple[Level, ...]:
    """The recompute levels of plans: without a limit of memory, nothing is recomputed."""
    return LEVELS if asked.site.memory is not None else LEVELS[:1]


def levels_in(measured: Measurements) -> tuple[Level, ...]:
    """The levels whose bytes are known."""
    return tuple(level for level in LEVELS if f"B {level} F own" in measured.sizes)


def held(asked: Asked, sizes: Sequence[int]) -> dict[str, Table]:
    """The tables of `Measurements.sizes`.

    Bytes grow by the same number with every row, so the two smallest sizes tell those of all.
    """
    found = []
    for size in sizes[:2]:
        try:
            found.append(_of_size(asked, size, levels_for(asked)))
        except BaseException as error:
            rows = counted(size, "row")
            add_note(error, f"raised for a microbatch of {rows}; tune begins with 1")
            raise
    nothing = (0.0,) * len(asked.units.names)
    names = dict.fromkeys(name for of_size in found for name in of_size)
    return {
        name: _for_all(sizes, [of_size.get(name, nothing) for of_size in found]) for name in names
    }


def _for_all(sizes: Sequence[int], values: Sequence[tuple[float, ...]]) -> Table:
    """The values of units at all sizes, from those at the first two."""
    if len(values) == 1:
        return tuple(values)
    (first, second, *_), (low, high) = sizes, values
    return tuple(
        tuple(
            one + (other - one) / (second - first) * (size - first)
            for one, other in zip(low, high, strict=True)
        )
        for size in sizes
    )


def _of_size(asked: Asked, size: int, levels: Sequence[Level]) -> dict[str, tuple[float, ...]]:
    num_units = len(asked.units.names)
    found: dict[str, tuple[float, ...]] = {}
    for form in FORMS:
        units = _costs(asked, size, even_spans(num_units, num_units), form, levels)
        # A unit has a neighbour on either side, so every second pair is measured at once.
        pairs = {
            span.start: costs
            for first in (0, 1)
            for span, costs in _in_pairs(asked, size, first, form, levels)
        }
        found["handed"] = tuple(of_unit.handed_bytes for of_unit in units)
        for level in levels:
            alone = [_at(of_unit, level) for of_unit in units]
            together = {unit: _at(costs, level) for unit, costs in pairs.items()}
            for kind in kinds_of(form):
                for name, values in _of_kind(kind, alone, together).items():
                    found[f"{form} {level} {kind.name} {name}"] = values
    return found


def _of_kind(
    kind: Kind, alone: Sequence[HeldBytes], together: Mapping[int, HeldBytes]
) -> dict[str, tuple[float, ...]]:
    """By name, a number for each unit: see `Measurements.sizes`."""
    units = range(len(alone))
    found = {
        "own": tuple(of_unit.own.get(kind, 0.0) for of_unit in alone),
        "beside": tuple(of_unit.beside.get(kind, 0.0) for of_unit in alone),
    }
    for unit in units:
        for (of, other), change in alone[unit].others.items():
            if of is kind:
                values = found.get(f"by {other - unit}", (0.0,) * len(alone))
                found[f"by {other - unit}"] = (*values[:unit], change, *values[unit + 1 :])
    before, after = (found.get(f"by {step}", (0.0,) * len(alone)) for step in (-1, 1))
    found["pair"] = tuple(
        together[unit].own.get(kind, 0.0)
        - (found["own"][unit] + after[unit] + found["own"][unit + 1] + before[unit + 1])
        if unit in together
        else 0.0
        for unit in units
    )
    found["pair beside"] = tuple(
        together[unit].beside.get(kind, 0.0) if unit in together else 0.0 for unit in units
    )
    return found


def _in_pairs(
    asked: Asked, size: int, first: int, form: str, levels: Sequence[Level]
) -> list[tuple[range, StageCosts]]:
    """The stages of two units, the first of which begins with unit 0 or 1."""
    num_units = len(asked.units.names)
    starts = [*range(first), *range(first, num_units, 2), num_units]
    spans = [range(start, stop) for start, stop in pairwise(starts)]
    if all(len(span) == 1 for span in spans):
        return []
    costs = _costs(asked, size, spans, form, levels)
    return [pair for pair in zip(spans, costs, strict=True) if len(pair[0]) > 1]


def _costs(
    asked: Asked, size: int, spans: Sequence[range], form: str, levels: Sequence[Level]
) -> list[StageCosts]:
    """The bytes that stages of these units hold at each level, for a microbatch of `size` rows."""
    units, homes = asked.units, [torch.device("cpu")] * len(spans)
    (args, kwargs), target = asked.batch(size)
    layers = [
        range(units.layers[span.start].start, units.layers[span.stop - 1].stop) for span in spans
    ]
    units.chain.cut(layers, homes, everywhere)
    all_layers = list(units.chain.layers.values())
    stages = [
        Stage(number, all_layers[of.start : of.stop], homes[0]) for number, of in enumerate(layers)
    ]
    (first,) = units.chain.enter([(args, kwargs)])
    assert first is not None
    losses = Losses.of_one(asked.loss_fn, target, in_one_memory=not asked.gpus)
    split = len(FORMS[form]) > 1
    return StageTrials(stages, first[0], losses, split=split, timed=False).costs(levels)


def _at(costs: StageCosts, level: str) -> HeldBytes:
    of_level = costs.kept.get(level) or costs.rebuilt[level]
    assert of_level.held is not None
    return of_level.held

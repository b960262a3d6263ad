"""The costs of stages of several units at each recompute level, from what units cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..budget.level_costs import HeldBytes, LevelCost, Rebuilt, StageCosts
from ..plan import Costs, Kind
from ..plan.costs import by_stage
from .held import kinds_of, levels_in
from .measurements import Measurements

# The bytes of a span of units by level, with other units in the place of other stages.
_OfSpan = Mapping[str, HeldBytes]


class StageLevels:
    """The costs at each level of stages, which may be of any units.

    A stage holds what its units hold as stages of their own, but for what two neighbours hold
    together: an output that both keep counts once.

    Args:
        measured: the measurements of the units.
    """

    def __init__(self, measured: Measurements) -> None:
        self._measured = measured
        self._levels = levels_in(measured)
        # A search asks for the same spans many times.
        self._units: dict[tuple[str, float], dict[str, _Units]] = {}
        self._spans: dict[tuple[str, float, range], _OfSpan] = {}

    def of(
        self, spans: Sequence[range], rows: float, costs: Costs, *, split: bool
    ) -> list[StageCosts]:
        """The costs of the stages of a plan.

        Args:
            spans: by stage, its units.
            rows: the rows of a microbatch.
            costs: the times of the stages.
            split: whether backwards are I and W.
        """
        form = "IW" if split else "B"
        stage_of = {unit: stage for stage, span in enumerate(spans) for unit in span}
        handed = self._measured.bytes_of("handed", rows)
        times = [by_stage(costs, kind, len(spans)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        found = []
        for span, forward, backward, *halves in zip(spans, *times, strict=True):
            of_span = self._of_span(form, rows, span)
            held = {level: _by_stage(one, stage_of) for level, one in of_span.items()}
            share = halves[0] / sum(halves) if sum(halves) > 0 else 0.5
            found.append(_costs(held, forward, backward, share, handed[span.stop - 1]))
        return found

    def _of_span(self, form: str, rows: float, span: range) -> _OfSpan:
        known = self._spans.get((form, rows, span))
        if known is None:
            if (form, rows) not in self._units:
                self._units[form, rows] = {
                    level: _Units(self._measured, rows, form, level) for level in self._levels
                }
            units = self._units[form, rows]
            known = {level: units[level].of(span) for level in self._levels}
            if form == "IW" and span.start == 0:
                whole = self._of_span("B", rows, span)
                known = {level: _first(level, known[level], whole[level]) for level in known}
            self._spans[form, rows, span] = known
        return known


class _Units:
    """The bytes of each unit at one level, with one form of backwards."""

    def __init__(self, measured: Measurements, rows: float, form: str, level: str) -> None:
        self._kinds = kinds_of(form)
        start = f"{form} {level} "
        tables: dict[tuple[str, ...], list[float]] = {
            tuple(name.removeprefix(start).split(" ", 1)): measured.bytes_of(name, rows)
            for name in measured.sizes
            if name.startswith(start)
        }
        self._own, self._beside, self._pair, self._pair_beside = (
            {kind: tables[kind.name, what] for kind in self._kinds}
            for what in ("own", "beside", "pair", "pair beside")
        )
        # By unit, what actions of other units change.
        self._others: list[dict[tuple[Kind, int], float]] = [{} for _ in measured.units]
        for (kind, what), values in tables.items():
            if what.startswith("by "):
                step = int(what.removeprefix("by "))
                for unit, value in enumerate(values):
                    if value:
                        self._others[unit][Kind[kind], unit + step] = value

    def of(self, span: range) -> HeldBytes:
        """The bytes of a stage of these units."""
        own: dict[Kind, float] = {}
        beside: dict[Kind, float] = {}
        others: dict[tuple[Kind, int], float] = {}
        for kind in self._kinds:
            own[kind], beside[kind] = self._through(kind, span)
        for unit in span:
            for key, change in self._others[unit].items():
                if key[1] not in span:
                    others[key] = others.get(key, 0.0) + change
        return HeldBytes(own, beside, others)

    def _through(self, kind: Kind, span: range) -> tuple[float, float]:
        """The bytes that an action adds, and those that it needs beside."""
        before = now = most = 0.0
        forward = kind in (Kind.F, Kind.R)
        for unit in span if forward else reversed(span):
            change = self._own[kind][unit]
            change += sum(
                by for (of, other), by in self._others[unit].items() if of is kind and other in span
            )
            after = now + change
            pair = unit - 1 if forward else unit
            if pair in span and pair + 1 in span:
                after += self._pair[kind][pair]
                most = max(most, max(before, after) + self._pair_beside[kind][pair])
            most = max(most, max(now, after) + self._beside[kind][unit])
            before, now = now, after
        return now, max(most - max(now, 0.0), 0.0)


def _first(level: str, halves: HeldBytes, whole: HeldBytes) -> HeldBytes:
    """The bytes of the first stage with I and W.

    It hands no gradient on: the I of all but its layers' own recompute has nothing to do, and its W
    is a whole backward, which lets go of everything.
    """
    own, beside = dict(halves.own), dict(halves.beside)
    if level != "layer":
        own[Kind.I] = beside[Kind.I] = 0.0
        beside[Kind.W] = whole.beside[Kind.B]
    own[Kind.W] = -(own[Kind.F] + own[Kind.R] + own[Kind.I] + sum(halves.others.values()))
    return replace(halves, own=own, beside=beside)


def _by_stage(held: HeldBytes, stage_of: Mapping[int, int]) -> HeldBytes:
    others: dict[tuple[Kind, int], float] = {}
    for (kind, unit), change in held.others.items():
        key = kind, stage_of[unit]
        others[key] = others.get(key, 0.0) + change
    return replace(held, others=others)


def _costs(
    held: _OfSpan, forward: float, backward: float, share: float, handed: float
) -> StageCosts:
    ops = held["ops"]
    kept = ops.own[Kind.F]
    left = max(kept + ops.own[Kind.I], 0.0) if Kind.I in ops.own else 0.0
    return StageCosts(
        {"ops": LevelCost(forward, backward, kept, left, share, ops)},
        {
            level: Rebuilt(forward, own[Kind.F], own[Kind.F] + own[Kind.R], held=held[level])
            for level in held
            if level != "ops"
            for own in [held[level].own]
        },
        workspace_bytes=max(max(one.beside.values()) for one in held.values()),
        handed_bytes=handed,
    )

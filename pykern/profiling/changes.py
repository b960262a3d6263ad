"""Changes that would shorten a step, with their predicted times, by simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..partition.bottleneck import ends_for_speeds, spans_of
from ..partition.unequal import stage_speeds
from ..plan import Costs, Kind, Memory, Plan, PlanError, peak_bytes
from ..plan.costs import by_stage, changed
from ..schedules import by_name
from .causes import device_speeds
from .observed import Observed
from .stage_costs import (
    known,
    makespan_ns,
    mapped,
    message_ns,
    of_stages,
    with_messages,
    without_overhead,
)

# The number of changes that are told, and the least gain that is.
TOLD, LEAST_GAIN = 3, 0.02
# Another schedule may hold this much more than the present step.
MORE_HELD = 1.05
# Numbers of microbatches are the present one times these.
TIMES = (4, 2, 0.5, 0.25)


@dataclass(frozen=True)
class Improvement:
    """A change of a pipeline.

    Attributes:
        family: the thing that it changes, such as "microbatches" or "schedule and cut".
        name: how to write it.
        edits: the number of arguments that it changes.
        held: the activations of the fullest device, as a multiple of the present ones.
        step_ns: the makespan of a step with it, predicted from the measured one.
        gain: the part of the makespan that it saves.
        basis: how the prediction was made.
    """

    family: str
    name: str
    edits: int
    held: float
    step_ns: float
    gain: float
    basis: str


def changes_of(seen: Observed) -> list[Improvement]:
    """The best change of each family: those of one argument first, then by their gain."""
    best: dict[str, Improvement] = {}
    for change in _tried(seen):
        held = best.get(change.family)
        if change.gain >= LEAST_GAIN and (held is None or change.gain > held.gain):
            best[change.family] = change
    return sorted(best.values(), key=lambda change: (change.edits, -change.gain))[:TOLD]


def _tried(seen: Observed) -> Iterator[Improvement]:
    now_ns = seen.timeline.makespan_ns
    if seen.one_thread is not None:
        then_ns = seen.one_thread.makespan_ns
        name = "torch.set_num_threads(1)"
        yield Improvement("threads", name, 1, 1.0, then_ns, 1 - then_ns / now_ns, "measured")
    model = LayerCosts(seen)
    simulated_ns = makespan_ns(seen.plan, model.costs(seen.plan, model.spans))
    if not simulated_ns:
        return  # of no time, nothing can be saved
    held = model.held(seen.plan, model.spans)

    def change(
        family: str, name: str, edits: int, plan: Plan, spans: Sequence[range]
    ) -> Improvement:
        share = makespan_ns(plan, model.costs(plan, spans)) / simulated_ns
        more = model.held(plan, spans) / held
        return Improvement(family, name, edits, more, share * now_ns, 1 - share, model.basis(plan))

    spans = model.cut(seen.plan)
    cut = change("cut", f"balance={[len(span) for span in spans]}", 1, seen.plan, spans)
    # The times of frozen layers tell nothing about how others are shared out.
    if seen.plan.first_trained == 0:
        yield cut
    for family, name, plan in _other_plans(seen):
        if plan.placement == seen.plan.placement:
            other = change(family, name, 1, plan, model.spans)
        elif _can_be_cut(seen, plan):
            other = change(f"{family} and cut", f'{name}, balance="time"', 2, plan, model.cut(plan))
            if other.gain < max(cut.gain, 0) + LEAST_GAIN:
                continue
        else:
            continue
        if family == "microbatches" or other.held <= MORE_HELD:
            yield other


def _can_be_cut(seen: Observed, plan: Plan) -> bool:
    """Whether the layers, and their times, make the stages of this plan."""
    alike = plan.placement.num_replicas == seen.plan.placement.num_replicas
    return alike and plan.num_stages <= len(seen.layer_ns)


def _other_plans(seen: Observed) -> Iterator[tuple[str, str, Plan]]:
    """Plans with another number of microbatches, or of another schedule."""
    count = seen.plan.num_microbatches
    if seen.rows is None:
        return  # without the model, other plans cannot be made
    if seen.make_plan(None, count) != seen.plan:
        return  # with recompute or frozen stages, which other plans would have in other places
    for factor in TIMES:
        other = count * factor
        if 1 <= other <= seen.rows and other == int(other):
            plan = _made(seen, None, int(other))
            if plan is not None:
                yield "microbatches", f"microbatches={plan.num_microbatches}", plan
    for name in by_name:
        plan = _made(seen, name, count)
        # A step has a backward.
        if plan is not None and plan != seen.plan and (plan.has(Kind.B) or plan.has(Kind.I)):
            yield "schedule", f'schedule="{name}"', plan


def _made(seen: Observed, schedule: str | None, microbatches: int) -> Plan | None:
    """The plan; None where the schedule does not take these counts, or a pipeline that schedule."""
    try:
        return seen.make_plan(schedule, microbatches)
    except (PlanError, ValueError, TypeError):
        return None


class LayerCosts:
    """The costs of any plan and cut, from the times of layers and the costs of one plan.

    Where layers were not measured, the present stages stand for them.
    """

    def __init__(self, seen: Observed) -> None:
        plan = seen.plan
        self._seen = seen
        layers = without_overhead(seen.quiet_costs, plan.num_stages, seen.action_ns)
        took = of_stages(layers, plan)
        self.speeds = device_speeds(seen)
        if seen.layer_ns:
            of_stage = zip(took, stage_speeds(plan, self.speeds), strict=True)
            total = sum(ns * speed for ns, speed in of_stage)
            self.layer_ns = [ns * total / sum(seen.layer_ns) for ns in seen.layer_ns]
            self.spans: Sequence[range] = seen.spans
        else:
            self.layer_ns = took
            self.spans = [range(stage, stage + 1) for stage in range(plan.num_stages)]
        self._parts = {
            kind: sum(known(by_stage(layers, kind, plan.num_stages))) / max(sum(took), 1e-9)
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        }
        self._parts[Kind.R] = self._parts[Kind.F]
        if not plan.has(Kind.I):
            self._parts |= dict.fromkeys((Kind.I, Kind.W), self._parts[Kind.B] / 2)

    def basis(self, plan: Plan) -> str:
        """The assumptions behind the costs of a plan."""
        if plan.has(Kind.I) and not self._seen.plan.has(Kind.I):
            return "simulated, I and W as half of B each"
        return "simulated"

    def costs(self, plan: Plan, spans: Sequence[range]) -> Costs:
        """The costs of the plan's stages, each of these layers."""
        smaller = self._seen.plan.num_microbatches / plan.num_microbatches
        of_stage = [smaller * sum(self.layer_ns[n] for n in span) for span in spans]
        blank = Costs([0.0] * len(spans), [0.0] * len(spans))
        of = mapped(blank, len(spans), lambda kind, stage, _: self._time(kind, of_stage[stage]))
        messages = [smaller * ns for ns in self._message_ns(plan)]
        return with_messages(changed(of, device_speeds=self.speeds), messages)

    def _message_ns(self, plan: Plan) -> list[float]:
        """By boundary, the time of a copy of the present size; the mean where others cross."""
        present = self._seen.plan
        times = message_ns(self._seen.quiet_costs, present.num_stages)
        if plan.placement == present.placement:
            return times
        crossing = [ns for ns in times if ns]
        return [sum(crossing) / max(len(crossing), 1)] * plan.num_stages

    def _time(self, kind: Kind, layers_ns: float) -> float:
        # I and W are measured where they run; else they take what B takes.
        beside = self._seen.action_ns
        return beside.get(kind, beside.get(Kind.B, 0.0)) + self._parts[kind] * layers_ns

    def cut(self, plan: Plan) -> list[range]:
        """The cut for which the slowest stage takes least."""
        costs = [round(ns) + 1 for ns in self.layer_ns]
        ends = ends_for_speeds(costs, stage_speeds(plan, self.speeds))
        return list(spans_of(ends))

    def held(self, plan: Plan, spans: Sequence[range]) -> float:
        """The activations of the fullest device, in microbatches of the present plan."""
        smaller = self._seen.plan.num_microbatches / plan.num_microbatches
        shares = [smaller * len(span) / len(self.layer_ns) for span in spans]
        held = max(peak_bytes(plan, Memory(shares)))
        return math.inf if math.isnan(held) else held

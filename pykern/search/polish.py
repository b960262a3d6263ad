"""Polish: a search's plan improved by an exact solver, for plans of a few hundred actions.

Polishing needs OR-tools: `pip install pykern-runtime[search]`.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from .._C import Candidate
from .._C import search as _search
from ..plan import Action, Kind, Memory, Plan, simulate
from ..plan.costs import TIME_OF
from ..plan.counts import require_numbers
from .search import Found

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntervalVar, IntVar
    from ortools.sat.python.cp_model_helper import CpSolverStatus

# The ticks of the longest action, unless a common unit of all times makes it fewer.
_MOST_TICKS = 1000
# The units of one activation: so many that the part kept until W is a whole number too.
_MEMORY_UNITS = 1_000_000
# The search's budget to fuse the backwards that need no split.
_FUSE_MS = 10


def polish(found: Found, seconds: float) -> Found:
    """The same placement with the best order that CP-SAT finds, starting from the order of `found`.

    Microbatches run first in, first out on every stage, which loses nothing because they are alike.
    The solver's progress within its time depends on the machine.

    Args:
        found: The result of `pykern.search.auto`, with equal activations on all stages.
        seconds: Time to solve, on all cores.

    Returns:
        The result with the better plan, or `found` itself if the solver finds no better plan.

    Raises:
        ImportError: OR-tools is not installed.
        TypeError: `found` is another's result, or the time is not a number.
        ValueError: The time is not above 0, or activations differ between stages.
    """
    if not isinstance(found, Found):
        raise TypeError(f"found must be the result of pykern.search.auto, got {found!r}")
    require_numbers(seconds=seconds)
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, got {seconds}")
    from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra

    model = _Model(found, cp_model.CpModel())
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = _solve(solver, model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return found
    starts = {action: solver.value(cell.start) for action, cell in model.cells.items()}
    used = {action for action, cell in model.cells.items() if solver.value(cell.used)}
    plan = _plan_of(found.plan, {action: starts[action] for action in used})
    better = _search(
        [Candidate(plan.placement, found.costs, found.memory, found.loss == "outside")],
        plan.num_microbatches,
        found.cap,
        [(0, plan)],
        _FUSE_MS,
        0,
    )
    if better.makespan_ns >= found.makespan_ns:
        return found
    return replace(found, plan=better.plan, makespan_ns=better.makespan_ns, peak=better.peaks)


def _solve(solver: CpSolver, model: CpModel) -> CpSolverStatus:
    """Solves on a separate thread, so that an interrupt reaches the caller and ends the solver."""
    # The solver's own handler would replace Python's, and not restore it.
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except BaseException:
            solver.stop_search()
            raise


@dataclass(frozen=True)
class _Cell:
    """One action in the model; `used` is constant 1, or a variable for an I, W or B."""

    start: IntVar
    end: IntVar
    used: IntVar
    interval: IntervalVar


class _Model:
    """Intervals that do not overlap on a device, precedences, and a cap over lifetimes."""

    def __init__(self, found: Found, model: CpModel) -> None:
        self.plan = found.plan
        self.model = model
        self.found = found
        self.ticks_per_ns = _ticks_per_ns(found)
        timeline = simulate(found.plan, found.costs)
        self.hints = {
            span.action: self._ticks(span.start_ns) for row in timeline.rows for span in row
        }
        # The sum of rounded times may be above the rounded sum.
        self.horizon = self._ticks(found.makespan_ns) + found.plan.num_actions
        self.priced = _split_has_price(found)
        self.cells: dict[Action, _Cell] = {}
        for stage in range(self.plan.num_stages):
            for microbatch in range(self.plan.num_microbatches):
                self._add_cell(stage, microbatch)
        self._add_precedences()
        for device in range(self.plan.num_devices):
            self._add_device(device, found)
        makespan = model.new_int_var(0, self.horizon, "makespan")
        for cell in self.cells.values():
            model.add(makespan >= cell.end)
        model.minimize(makespan)

    def _ticks(self, time_ns: float) -> int:
        return round(time_ns * self.ticks_per_ns)

    def _time(self, action: Action) -> int:
        return self._ticks(_time_ns(self.found, action))

    def _add_cell(self, stage: int, microbatch: int) -> None:
        always = self.model.new_constant(1)
        whole = self.model.new_bool_var("whole") if self.priced else self.model.new_constant(0)
        split = self.model.new_bool_var("split") if self.priced else always
        self.model.add(whole + split == 1)
        halves = (self.found.costs.input_ns, self.found.costs.weight_ns)
        if any(math.isnan(_at(times, stage)) for times in halves):
            self.model.add(split == 0)
        uses = {Kind.F: always, Kind.I: split, Kind.W: split}
        if self.priced:
            uses[Kind.B] = whole
        for kind, used in uses.items():
            action = Action(kind, stage, microbatch)
            self._add_action(action, used)

    def _add_action(self, action: Action, used: IntVar) -> None:
        start = self.model.new_int_var(0, self.horizon, f"{action} start")
        end = self.model.new_int_var(0, self.horizon, f"{action} end")
        interval = self.model.new_optional_interval_var(
            start, self._time(action), end, used, str(action)
        )
        self.cells[action] = _Cell(start, end, used, interval)
        whole = Action(Kind.B, action.stage, action.microbatch)
        if action in self.hints:
            self.model.add_hint(start, self.hints[action])
        elif action.kind is Kind.I:
            self.model.add_hint(start, self.hints[whole])
        elif action.kind is Kind.W:
            half = self._time(Action(Kind.I, action.stage, action.microbatch))
            self.model.add_hint(start, self.hints[whole] + half)

    def _after(self, later: Action, earlier: Action, hop: int = 0) -> None:
        """Constrains `later` to start after `earlier`, if both are used."""
        if later in self.cells and earlier in self.cells:
            cells = (self.cells[later], self.cells[earlier])
            constraint = self.model.add(cells[0].start >= cells[1].end + hop)
            constraint.only_enforce_if([cell.used for cell in cells])

    def _hop(self, stage: int) -> int:
        return self._ticks(_hop_ns(self.found, stage))

    def _add_precedences(self) -> None:
        backwards = (Kind.I, Kind.B)
        # Gradients add up in ascending order of microbatches, by W and B.
        ordered = {
            Kind.F: (Kind.F,),
            Kind.I: backwards,
            Kind.W: (Kind.W, Kind.B),
            Kind.B: (*backwards, Kind.W),
        }
        for action in self.cells:
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            if microbatch > 0:
                for before in ordered[kind]:
                    self._after(action, Action(before, stage, microbatch - 1))
            if kind in backwards and stage + 1 < self.plan.num_stages:
                for before in backwards:
                    self._after(action, Action(before, stage + 1, microbatch), self._hop(stage))
            if kind is Kind.F and stage > 0:
                self._after(action, Action(kind, stage - 1, microbatch), self._hop(stage - 1))
            if kind in backwards:
                self._after(action, Action(Kind.F, stage, microbatch))
            if kind is Kind.W:
                self._after(action, Action(Kind.I, stage, microbatch))
        if self.found.loss == "outside":
            self._add_barrier()

    def _add_barrier(self) -> None:
        """Makes the first backward start after the last forward, so after all forwards."""
        stage = self.plan.num_stages - 1
        for kind in (Kind.I, Kind.B):
            last = Action(Kind.F, stage, self.plan.num_microbatches - 1)
            self._after(Action(kind, stage, 0), last)

    def _add_device(self, device: int, found: Found) -> None:
        mine = {a: c for a, c in self.cells.items() if self.plan.device_of(a) == device}
        self.model.add_no_overlap([cell.interval for cell in mine.values()])
        activation, kept = _memory_units(found.memory)
        lives, demands = [], []
        for action, cell in mine.items():
            given = {Kind.I: _MEMORY_UNITS - kept, Kind.W: kept, Kind.B: _MEMORY_UNITS}
            if not given.get(action.kind):
                continue
            forward = self.cells[Action(Kind.F, action.stage, action.microbatch)]
            length = self.model.new_int_var(0, self.horizon, "")
            lives.append(
                self.model.new_optional_interval_var(forward.start, length, cell.end, cell.used, "")
            )
            demands.append(given[action.kind])
        cap = found.cap[device] / activation
        self.model.add_cumulative(lives, demands, math.floor(cap * _MEMORY_UNITS + 0.5))


def _memory_units(memory: Memory) -> tuple[float, int]:
    """The bytes of an activation, and the number of its units that are kept until W."""
    activation, kept = memory.activation_bytes, memory.kept_bytes
    if isinstance(activation, list) or isinstance(kept, list):
        raise ValueError(
            "activations must be alike on all stages for polish, got unequal ones. Use "
            "pykern.search.auto"
        )
    return activation, round(kept / activation * _MEMORY_UNITS)


def _time_ns(found: Found, action: Action) -> float:
    costs = found.costs
    speed = _at(costs.device_speeds, found.plan.device_of(action))
    time_ns = _at(getattr(costs, TIME_OF[action.kind]), action.stage)
    if math.isnan(time_ns):  # a half of unknown time is not used; this value prices the split
        time_ns = _at(costs.backward_ns, action.stage)
    return costs.overhead_ns + time_ns / speed


def _hop_ns(found: Found, stage: int) -> float:
    """The time of a transfer from a stage to the next, or back."""
    placement = found.plan.placement
    if placement.device_of(stage) == placement.device_of(stage + 1):
        return 0.0
    costs = found.costs
    return costs.transfer_ns + _at(costs.message_bytes, stage) / costs.bandwidth


def _at(values: float | list[float], index: int) -> float:
    return values[index] if isinstance(values, list) else values


def _times(found: Found) -> list[float]:
    """All times that occur, in ns."""
    stages = range(found.plan.num_stages)
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    times = [_time_ns(found, Action(kind, stage, 0)) for kind in kinds for stage in stages]
    return times + [_hop_ns(found, stage) for stage in stages[:-1]]


def _split_has_price(found: Found) -> bool:
    """Whether a B takes less than its I and W on some stage."""

    def time_ns(kind: Kind, stage: int) -> float:
        return _time_ns(found, Action(kind, stage, 0))

    return any(
        time_ns(Kind.B, stage) < time_ns(Kind.I, stage) + time_ns(Kind.W, stage)
        for stage in range(found.plan.num_stages)
    )


def _ticks_per_ns(found: Found) -> float:
    """The coarsest unit in which all times are whole, or a unit that rounds them a little."""
    times = _times(found)
    largest = max(times)
    shares = [Fraction(time / largest).limit_denominator(_MOST_TICKS) for time in times]
    common = math.lcm(*(share.denominator for share in shares))
    return min(common, _MOST_TICKS) / largest


def _plan_of(like: Plan, starts: dict[Action, int]) -> Plan:
    rows: list[list[Action]] = [[] for _ in range(like.num_devices)]
    for action in sorted(starts, key=lambda a: (starts[a], a.kind is not Kind.F, a.microbatch)):
        rows[like.device_of(action)].append(action)
    return Plan(like.placement, like.num_microbatches, rows)

"""Fits a plan's activations into a memory budget at the least predicted time.

Each stage gets a level of the kernels and, if that is not enough, microbatches that are recomputed.
These are as few as the budget allows, and first those whose R costs nothing because their device
waits before their backward anyway. The simulator decides between the candidates, which include the
uniform ones: one level for all stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..plan import Action, Costs, Kind, Plan, Timeline, simulate, with_recompute
from .fit_memory import most_held
from .level_costs import BACKWARD, StageCosts, StageLevel, costs_of, memory_of
from .sweep import Sweep


@dataclass(frozen=True)
class Fitted:
    """A plan that fits.

    Attributes:
        plan: the plan, with the R of every cell that is recomputed.
        levels: one level for each stage.
        timeline: the timeline that the simulator predicts.
        peak_bytes: the predicted peak of each device, including the workspace of its actions.
        budget_bytes: the bytes that each device may hold.
    """

    plan: Plan
    levels: tuple[StageLevel, ...]
    timeline: Timeline
    peak_bytes: tuple[float, ...]
    budget_bytes: tuple[float, ...]

    def __str__(self) -> str:
        """A line for each stage and each device, and the step's predicted time."""
        placement = self.plan.placement
        lines = []
        for stage, levels in enumerate(self.by_microbatch()):
            counts = ", ".join(f"{level} x {n}" for level, n in Counter(levels).items())
            lines.append(f"stage {stage} on device {placement.device_of(stage)}: {counts}")
        for device, (peak, budget) in enumerate(
            zip(self.peak_bytes, self.budget_bytes, strict=True)
        ):
            lines.append(f"device {device}: {peak:,.0f} of {budget:,.0f} bytes of activations")
        lines.append(f"step: {self.time_ns / 1e6:.3f} ms predicted")
        return "\n".join(lines)

    @property
    def time_ns(self) -> float:
        """The predicted time of a step."""
        return self.timeline.makespan_ns

    def by_microbatch(self) -> list[list[str]]:
        """The level of every microbatch of every stage."""
        levels = [[level.kept] * self.plan.num_microbatches for level in self.levels]
        for row in self.plan.rows:
            for action in row:
                rebuilt = self.levels[action.stage].rebuilt
                if action.kind is Kind.R and rebuilt is not None:
                    levels[action.stage][action.microbatch] = rebuilt
        return levels


def fit(plan: Plan, stages: Sequence[StageCosts], budget_bytes: Sequence[float]) -> Fitted:
    """The fastest levels found under which no device holds more than its budget.

    Args:
        plan: a plan with backwards and without R.
        stages: the costs of each stage at each level.
        budget_bytes: one budget for each device.

    Raises:
        ValueError: the plan holds R or no backward, a number does not fit the plan, or a device's
            budget is too small for any levels; the message gives the smallest possible budget.
    """
    if plan.has(Kind.R) or not any(plan.has(kind) for kind in BACKWARD):
        raise ValueError(
            "plan must have backwards and no R before levels are chosen, got one without "
            "backwards or with R. Give a plan of a training schedule, before recompute() adds R"
        )
    if len(stages) != plan.num_stages:
        raise ValueError(
            f"costs must hold one entry for each of {plan.num_stages} stages, got {len(stages)}"
        )
    if len(budget_bytes) != plan.num_devices:
        raise ValueError(
            f"budget_bytes must hold one number for each of {plan.num_devices} devices, got "
            f"{len(budget_bytes)}"
        )
    return _Fit(plan, stages, budget_bytes).best()


class _Fit:
    def __init__(
        self, plan: Plan, stages: Sequence[StageCosts], budget_bytes: Sequence[float]
    ) -> None:
        self._plan = plan
        # Each look at a plan's rows makes objects of all of its actions.
        self._rows = plan.rows
        self._stages = stages
        self._budgets = tuple(budget_bytes)
        self._devices_of = [sorted(set(of)) for of in zip(*plan.placement.replicas, strict=True)]
        self._caps = list(self._budgets)

    def best(self) -> Fitted:
        """See `fit`."""
        fitting: list[Fitted] = []
        # The extra bytes depend on the levels, and the levels on the extra bytes. So the least
        # possible extra bytes are tried first, and then the most.
        for beside in (self._least_beside, self._beside):
            self._caps = [budget - beside(d) for d, budget in enumerate(self._budgets)]
            candidates = [self._try(levels) for levels in self._uniform()]
            fitting += [candidate for candidate in candidates if candidate is not None]
            mixed = self._mixed()
            if mixed is not None:
                fitting.append(mixed)
                break
        if not fitting:
            raise ValueError(self._refusal())
        return min(fitting, key=lambda fitted: fitted.time_ns)

    def _least_beside(self, device: int) -> float:
        """The least bytes that the device needs beside its cells, over the levels of its stages."""
        found = [0.0]
        for stage in self._stages_on(device):
            costs = self._stages[stage]
            measured = [kept.held for kept in costs.kept.values()]
            needs = [max(held.beside.values()) for held in measured if held is not None]
            found.append(min(needs, default=costs.workspace_bytes))
        return max(found)

    def _beside(self, device: int) -> float:
        """The most bytes that the device needs beside those of its cells."""
        stages = self._stages_on(device)
        workspace = max((self._stages[stage].workspace_bytes for stage in stages), default=0.0)
        # A gradient waits for a cell of the previous stage.
        gradients = sum(
            self._stages[stage].gradient_bytes * self._most_cells(stage - 1)
            for stage in stages
            if stage > 0
        )
        return workspace + gradients

    def _most_cells(self, stage: int) -> int:
        """The most cells of a stage that are at a time between F and the end of their B or I."""
        most = now = 0
        for device in self._devices_of[stage]:
            for action in self._rows[device]:
                if action.stage == stage and action.kind is Kind.F:
                    now += 1
                    most = max(most, now)
                elif action.stage == stage and action.kind in BACKWARD:
                    now -= 1
        return most

    def _costs_of(self, levels: Sequence[StageLevel]) -> Costs:
        return costs_of(self._stages, levels, self._plan.num_microbatches)

    def _stages_on(self, device: int) -> list[int]:
        return [stage for stage, devices in enumerate(self._devices_of) if device in devices]

    # --- the same level everywhere ---

    def _uniform(self) -> Iterator[list[StageLevel]]:
        every = frozenset(range(self._plan.num_microbatches))
        for kept in self._common(stage.kept for stage in self._stages):
            yield [StageLevel(kept)] * len(self._stages)
            for rebuilt in self._common(stage.rebuilt for stage in self._stages):
                yield [StageLevel(kept, rebuilt, every)] * len(self._stages)

    @staticmethod
    def _common(levels: Iterable[Iterable[str]]) -> list[str]:
        first, *others = (list(of_stage) for of_stage in levels)
        return [level for level in first if all(level in other for other in others)]

    # --- as each device needs ---

    def _mixed(self) -> Fitted | None:
        """Starts from the best levels for each device alone, and changes one device at a time."""
        options = [self._options(device) for device in range(self._plan.num_devices)]
        if not all(options):
            return None
        chosen: dict[int, StageLevel] = {}
        for device_options in options:
            chosen |= device_options[0]
        best = self._try(self._in_order(chosen))
        for device_options in options:
            for option in device_options[1:]:
                changed = chosen | option
                candidate = self._try(self._in_order(changed))
                if candidate is not None and (best is None or candidate.time_ns < best.time_ns):
                    best, chosen = candidate, changed
        return best

    def _in_order(self, levels: dict[int, StageLevel]) -> list[StageLevel]:
        return [levels[stage] for stage in range(len(self._stages))]

    def _options(self, device: int) -> list[dict[int, StageLevel]]:
        """Levels of a device's stages that fit, the levels with the least busy time first."""
        stages = self._stages_on(device)
        found: list[tuple[float, int, dict[int, StageLevel]]] = []
        for kept in self._common(self._stages[stage].kept for stage in stages):
            for rebuilt in [None, *self._common(self._stages[stage].rebuilt for stage in stages)]:
                priced = self._recomputed(device, kept, rebuilt)
                if priced is None:
                    continue
                price, cells = priced
                levels = {
                    stage: StageLevel(kept, rebuilt, frozenset(m for s, m in cells if s == stage))
                    for stage in stages
                }
                found.append((price, len(found), levels))
        return [levels for _, _, levels in sorted(found, key=lambda option: option[:2])]

    def _recomputed(
        self, device: int, kept: str, rebuilt: str | None
    ) -> tuple[float, set[tuple[int, int]]] | None:
        """The device's busy time and the cells that it has to recompute; None if no set fits."""
        row = self._rows[device]
        sweep = Sweep(row, self._stages, kept, rebuilt, self._gaps(device, kept))
        for position in range(len(row)):
            if not sweep.take(position, self._caps[device]):
                return None
        busy = sum(
            self._stages[action.stage].kept[kept].forward_ns
            + self._stages[action.stage].kept[kept].backward_ns
            for action in row
            if action.kind is Kind.F
        )
        return busy + sum(sweep.price(cell) for cell in sweep.recomputed), sweep.recomputed

    def _gaps(self, device: int, kept: str) -> dict[tuple[int, int], float]:
        """The time that the device waits right before each cell's backward, without recompute."""
        levels = [StageLevel(kept if kept in s.kept else next(iter(s.kept))) for s in self._stages]
        timeline = simulate(self._plan, self._costs_of(levels))
        gaps: dict[tuple[int, int], float] = {}
        free = 0.0
        for span in timeline.rows[device]:
            if span.action.kind in BACKWARD:
                gaps[span.action.stage, span.action.microbatch] = max(span.start_ns - free, 0.0)
            free = max(free, span.end_ns)
        return gaps

    # --- what it comes to ---

    def _try(self, levels: Sequence[StageLevel]) -> Fitted | None:
        """The plan at these levels; None if it does not fit."""
        cells = _cells(levels)
        costs = self._costs_of(levels)
        plan = self._plan
        if cells:
            # All devices get the cap 1: a stage's bytes are given as shares of its device's cap.
            caps = [max(cap, 1.0) for cap in self._caps]
            shares = [1 / min(caps[d] for d in devices) for devices in self._devices_of]
            plan = with_recompute(plan, cells, costs, memory_of(self._stages, levels, shares), 1.0)
        peaks = tuple(most_held(plan, self._stages, levels))
        if any(peak > budget for peak, budget in zip(peaks, self._budgets, strict=True)):
            return None
        return Fitted(plan, tuple(levels), simulate(plan, costs), peaks, self._budgets)

    def _refusal(self) -> str:
        least = [min(self._least(device)) for device in range(self._plan.num_devices)]
        pairs = zip(range(len(least)), least, self._budgets, strict=True)
        short = [(device, need, has) for device, need, has in pairs if need > has]
        if not short:
            return (
                "num_bytes must be enough for some levels on all devices together, got too little. "
                "Use more devices, or smaller microbatches"
            )
        device, need, has = short[0]
        return (
            f"num_bytes must be at least {need:,.0f} for the activations of device {device} at any "
            f"level, got {has:,.0f}. Use more devices, or smaller microbatches"
        )

    def _least(self, device: int) -> Iterator[float]:
        """The peak of the device at each uniform level, holding as little as possible."""
        for levels in self._uniform():
            cells = _cells(levels)
            plan = self._plan
            if cells:
                memory = memory_of(self._stages, levels)
                plan = with_recompute(plan, cells, self._costs_of(levels), memory, 0.0)
            yield most_held(plan, self._stages, levels)[device]


def _cells(levels: Sequence[StageLevel]) -> list[Action]:
    """The R of every cell that is recomputed."""
    return [
        Action(Kind.R, stage, microbatch)
        for stage, level in enumerate(levels)
        if level.rebuilt is not None
        for microbatch in sorted(level.microbatches)
    ]

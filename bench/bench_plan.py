"""Claim: planning is instant. Generation, check, simulation and copies, beside torch's own.

Interleaved 1F1B with two chunks, for which torch.distributed.pipelining makes the same rows.
Baseline: torch's functions for the same task, which are Python. Every call starts from scratch, and
all of ours that take a plan prove it first; torch's do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _simulate_comms_compute,
    _validate_schedule,
)

from pykern import schedules
from pykern.plan import Costs, Plan, check, check_lowered, lower, simulate

from .harness import Contender, Record, interleave, judge

Report = Callable[[list[Record]], None]

_NUM_CHUNKS = 2
_SMALL, _MEDIUM, _LARGE = (4, 8), (8, 256), (64, 1024)
_ROUNDS = {_SMALL: 300, _MEDIUM: 20, _LARGE: 3}
_COSTS = Costs(1e6, 2e6, 1e4)

_TorchRows = dict[int, list[_Action | None]]


@dataclass(frozen=True)
class Case:
    """One size, with what the tasks start from."""

    num_devices: int
    num_microbatches: int

    def __str__(self) -> str:
        return f"P={self.num_devices} M={self.num_microbatches}"

    @property
    def num_stages(self) -> int:
        return _NUM_CHUNKS * self.num_devices

    def plan(self) -> Plan:
        return schedules.interleaved(self.num_devices, self.num_microbatches, _NUM_CHUNKS)

    def torch_order(self) -> _TorchRows:
        """The first part of the constructor of torch's schedule; the rest of it needs ranks."""
        schedule = object.__new__(ScheduleInterleaved1F1B)
        schedule.pp_group_size = self.num_devices
        schedule.n_local_stages = _NUM_CHUNKS
        schedule._n_microbatches = self.num_microbatches
        schedule.number_of_rounds = max(1, self.num_microbatches // self.num_devices)
        schedule.microbatches_per_round = self.num_microbatches // schedule.number_of_rounds
        ranks = range(self.num_devices)
        return {rank: schedule._calculate_single_rank_operations(rank) for rank in ranks}

    @cached_property
    def torch_actions(self) -> dict[int, list[_Action]]:
        """The order without the bubbles that it holds as None."""
        return {r: [a for a in row if a is not None] for r, row in self.torch_order().items()}

    def torch_rank(self, stage: int) -> int:
        return stage % self.num_devices

    def torch_lowered(self) -> dict[int, list[_Action]]:
        # It takes its argument apart.
        rows = {rank: list(row) for rank, row in self.torch_actions.items()}
        return _add_send_recv(rows, self.torch_rank, self.num_stages)

    def torch_check(self) -> None:
        rows: _TorchRows = {rank: list(row) for rank, row in self.torch_actions.items()}
        _validate_schedule(rows, self.num_devices, self.num_stages, self.num_microbatches)

    def assert_same_plan(self) -> None:
        """Both have the same rows, and copies for the same actions."""
        plan, theirs = self.plan(), self.torch_actions
        assert [[str(a) for a in row] for row in plan.rows] == [
            [str(a) for a in theirs[rank]] for rank in range(self.num_devices)
        ]
        sends = _ComputationType.SEND_F, _ComputationType.SEND_B
        sent = sorted(
            (a.stage_index, a.computation_type.value, a.microbatch_index)
            for row in self.torch_lowered().values()
            for a in row
            if a.computation_type in sends
        )
        copies = [copy.action for lane in lower(plan).lanes for copy in lane.copies]
        named = {"COPY_F": "SEND_F", "COPY_B": "SEND_B"}
        assert sorted((a.stage, named[a.kind.name], a.microbatch) for a in copies) == sent


def _contender(name: str, task: Callable[[], object]) -> Contender:
    """A task that is right by another assertion: it reports no loss and leaves no gradients."""

    def step() -> float:
        task()
        return 0.0

    return Contender(name, step, dict, lambda: None)


def _measure(
    task: str,
    case: Case,
    contenders: list[Contender],
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Report,
) -> None:
    rounds = 1 if smoke else _ROUNDS[case.num_devices, case.num_microbatches]
    samples = interleave(benchmark, contenders, rounds)
    if smoke:
        return
    num_actions = 2 * case.num_stages * case.num_microbatches

    def figures(median_ms: float, baseline_ms: float) -> Mapping[str, float]:
        return {
            "million actions/s": num_actions / median_ms / 1e3,
            "times as fast": baseline_ms / median_ms,
        }

    report(judge("plan", f"{task}, {case}", samples, contenders[0].name, figures))


@pytest.fixture
def case(size: tuple[int, int], smoke: bool) -> Case:
    made = Case(*(_SMALL if smoke else size))
    made.assert_same_plan()
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [_SMALL, _MEDIUM, _LARGE])
def test_generate(case: Case, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """The rows; ours are checked as well."""
    contenders = [_contender("torch", case.torch_order), _contender("pykern", case.plan)]
    _measure("generate", case, contenders, benchmark, smoke, report)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [_SMALL, _MEDIUM, _LARGE])
def test_check(case: Case, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """The proof that the rows can run; torch's looks at each rank alone."""
    plan = case.plan()
    contenders = [_contender("torch", case.torch_check), _contender("pykern", lambda: check(plan))]
    _measure("check", case, contenders, benchmark, smoke, report)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [_SMALL, _MEDIUM, _LARGE])
def test_lower(case: Case, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """The copies; ours have slots of rings, and are checked in the third."""
    plan = case.plan()
    contenders = [
        _contender("torch", case.torch_lowered),
        _contender("pykern", lambda: lower(plan)),
        _contender("pykern, generated and checked", lambda: check_lowered(lower(case.plan()))),
    ]
    _measure("lower", case, contenders, benchmark, smoke, report)


# torch's takes 18 seconds for the large one.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [_SMALL, _MEDIUM])
def test_simulate(case: Case, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """When each action runs; torch's counts steps with sends and receives, ours knows costs."""
    plan, rows = case.plan(), case.torch_lowered()

    def theirs() -> object:
        return _simulate_comms_compute(dict(rows), case.torch_rank, case.num_stages)

    contenders = [
        _contender("torch", theirs),
        _contender("pykern", lambda: simulate(plan, _COSTS)),
    ]
    _measure("simulate", case, contenders, benchmark, smoke, report)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved"])
def test_million(name: str, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """The rate on large plans, for which there is no one to compare with."""
    size = _SMALL if smoke else {"one_f_one_b": (8, 62_500), "interleaved": _LARGE}[name]
    plan = schedules.by_name[name](*size)
    contenders = [
        _contender("check", lambda: check(plan)),
        _contender("simulate, with check", lambda: simulate(plan, _COSTS)),
    ]
    samples = interleave(benchmark, contenders, 1 if smoke else 30)
    if smoke:
        return

    def figures(median_ms: float, _: float) -> Mapping[str, float]:
        return {"million actions/s": plan.num_actions / median_ms / 1e3}

    case = f"{name} P={size[0]} M={size[1]}, {plan.num_actions} actions"
    report(judge("plan", case, samples, "check", figures))

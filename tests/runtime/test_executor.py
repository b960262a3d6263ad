"""The executor without tensors: each plan that the check accepts ends, in an order it allows."""

import random
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern import _C
from pykern.plan import Action, Kind, Placement, Plan, with_reductions
from tests.plan.strategies import Shape, valid_plans_with_shape
from tests.runtime.plans import two_replicas

Log = list[Action]


@pytest.fixture(scope="module")
def executor() -> Iterator[_C.WorkerExecutor]:
    executor = _C.WorkerExecutor(4)
    yield executor
    executor.close()


def run(
    executor: _C.WorkerExecutor, plan: Plan, pause: Callable[[], object], steps: int = 1
) -> list[Log]:
    """The actions that ran in each step, in order of completion."""
    logs: list[Log] = []
    num_replicas = plan.placement.num_replicas

    def record(kind: Kind, replica: int, stage: int) -> Callable[[int], None]:
        def call(microbatch: int) -> None:
            pause()
            assert microbatch % num_replicas == replica
            logs[-1].append(Action(kind, stage, microbatch))

        return call

    program = _C.WorkerProgram(plan)
    owners = [(replica, s) for replica in range(num_replicas) for s in range(plan.num_stages)]
    callbacks = {kind: [record(kind, *owner) for owner in owners] for kind in Kind}
    for _ in range(steps):
        logs.append([])
        with executor.claim():
            failures = executor.run(program, callbacks, lambda: int)
        assert failures == []
    return logs


@given(made=valid_plans_with_shape(max_slices=1), seed=st.integers(0, 1000))
def test_an_accepted_plan_ends(
    executor: _C.WorkerExecutor, made: tuple[Plan, Shape], seed: int
) -> None:
    plan, shape = made
    pauses = random.Random(seed)

    def pause() -> None:
        # About every other action is worth a thread of its own.
        if pauses.random() < 0.5:
            time.sleep(0.0002)

    for log in run(executor, plan, pause, steps=2):
        for device, row in enumerate(plan.rows):
            assert [a for a in log if plan.device_of(a) == device] == list(row)
        for i, action in enumerate(log):
            assert set(shape.needs(action)) <= set(log[:i])


def test_reductions_run_when_all_gradients_are_there(executor: _C.WorkerExecutor) -> None:
    plan = with_reductions(two_replicas(3, 5))
    (log,) = run(executor, plan, int)
    for stage in range(3):
        at = log.index(Action(Kind.REDUCE, stage, 0))
        assert sum(a.kind is Kind.B and a.stage == stage for a in log[:at]) == 5


def test_run_needs_a_claim_and_what_fits() -> None:
    forwards = [[Action(Kind.F, s, 0)] for s in range(2)]
    program = _C.WorkerProgram(Plan(Placement.linear(2), 1, forwards))
    executor = _C.WorkerExecutor(1)
    calls = {Kind.F: [int, int]}
    with pytest.raises(RuntimeError, match="needs a claim"):
        executor.run(program, calls, lambda: int)
    with executor.claim(), pytest.raises(ValueError, match="needs 2 workers, the executor has 1"):
        executor.run(program, calls, lambda: int)
    executor.close()
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        _C.WorkerExecutor(0)
    executor = _C.WorkerExecutor(2)
    with (
        executor.claim(),
        pytest.raises(ValueError, match=r"callbacks of kind F must be 2, .* got 1"),
    ):
        executor.run(program, {Kind.F: [int]}, lambda: int)
    with (
        executor.claim(),
        pytest.raises(ValueError, match=r"callbacks of kind F must be 2, .* got 0"),
    ):
        executor.run(program, {Kind.B: [int, int]}, lambda: int)
    replicated = _C.WorkerProgram(two_replicas(2, 2))
    with (
        executor.claim(),
        pytest.raises(ValueError, match=r"callbacks of kind F must be 4, .* got 2"),
    ):
        executor.run(replicated, calls, lambda: int)
    slices = [[Action(Kind.F, s, 0, j) for j in range(2)] for s in range(2)]
    sliced = _C.WorkerProgram(Plan(Placement.linear(2), 1, slices, 2))
    with (
        executor.claim(),
        pytest.raises(ValueError, match="whole microbatches for callbacks, got 2 slices"),
    ):
        executor.run(sliced, calls, lambda: int)
    executor.close()


def test_a_large_program_runs() -> None:
    """Eight devices, a thousand microbatches: counters, rows and rings have room."""
    num_devices, num_microbatches = 8, 1000
    rows = [
        [Action(Kind.F, device, m) for m in range(num_microbatches)]
        for device in range(num_devices)
    ]
    executor = _C.WorkerExecutor(num_devices)
    (log,) = run(executor, Plan(Placement.linear(num_devices), num_microbatches, rows), int)
    executor.close()
    assert len(log) == num_devices * num_microbatches


def test_what_begun_raises_ends_the_step(executor: _C.WorkerExecutor) -> None:
    """The caller left, while workers went on with what belonged to it."""
    raised = ValueError("begun")

    def begun() -> None:
        raise raised

    stages: dict[Kind, list[Callable[[int], None]]] = {Kind.F: [lambda _: None] * 2}
    program = _C.WorkerProgram.endless(Placement(2, [0, 1]), 2)
    with executor.claim():
        failures = executor.run(program, stages, lambda: int, begun)
    assert failures == [(None, -1, raised)]
    run(executor, two_replicas(2, 4), lambda: None)

"""No false alarms: models of every kind pass, on every schedule, as the tests of the zoo show them.

Every run checks each model on one schedule. All of it: `pytest -m nightly tests/verify`.
"""

from itertools import cycle

import pytest

from tests.fake_cuda.fake import FakeCuda
from tests.zoo.cells import NUM_STEPS, SCHEDULES, ZOO, Cell, cells_of, make, pipeline

# Reentrant checkpointing warns where nothing trains.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def check(cell: Cell, kind: str = "cpu") -> None:
    """Asserts that steps, and a forward, are verified and pass."""
    plan, case = cell.plan, make(cell.model)
    assert plan is not None
    if plan.placement.num_replicas > 1 and case.refuses_replicas is not None:
        return
    with pipeline(case, plan, kind, verify=1) as pipe:
        if cell.schedule != "forward_only":
            for _ in range(NUM_STEPS):
                pipe.step(*case.args, target=case.target, **case.kwargs)
        if case.has_modes:
            pipe.eval()
            pipe(*case.args, **case.kwargs)


def diagonal() -> list[Cell]:
    """For each model the next schedule, with the next counts that it takes."""
    following = cycle(SCHEDULES)
    found: list[Cell] = []
    for number, model in enumerate(ZOO):
        cells = list(cells_of(model, next(following)))
        found.append(cells[5 * number % len(cells)])
    return found


@pytest.mark.parametrize("cell", diagonal(), ids=str)
def test_the_plain_model_agrees(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", [Cell("padding_mask", "zb_v", 2, 5)], ids=str)
def test_the_plain_model_agrees_on_gpus(gpus: FakeCuda, cell: Cell) -> None:
    check(cell, "cuda")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ZOO)
def test_the_whole_matrix(model: str, schedule: str) -> None:
    failures = {}
    for cell in cells_of(model, schedule):
        try:
            check(cell)
        except Exception as error:
            failures[str(cell)] = repr(error)
    assert failures == {}

"""Models of every kind on every schedule equal the plain model, bit for bit.

Every run checks a part, in which each model meets three schedules, and each schedule and count some
models. All of it: `pytest -m nightly tests/zoo`.
"""

from itertools import cycle

import pytest

from pykern import schedules
from tests.diagonal import nightly
from tests.fake_cuda.fake import FakeCuda

from .cells import DEVICES, MICROBATCHES, NOT_YET, SCHEDULES, ZOO, Cell, cells_of

# The warning is of reentrant checkpointing, where nothing trains.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def diagonal() -> list[Cell]:
    """For each model the next three schedules, each with the next counts that it takes."""
    following = cycle(SCHEDULES)
    found: list[Cell] = []
    for number, model in enumerate(ZOO):
        for turn in range(3):
            cells = list(cells_of(model, next(following)))
            found.append(cells[(5 * number + 7 * turn) % len(cells)])
    return found


@pytest.mark.parametrize("cell", diagonal(), ids=str)
def test_every_bit_equals_the_plain_model(cell: Cell) -> None:
    cell.check()


def test_the_part_has_all_of_each() -> None:
    cells = diagonal()
    assert {cell.num_devices for cell in cells} == set(DEVICES)
    assert {cell.num_microbatches for cell in cells} == set(MICROBATCHES)
    for schedule in SCHEDULES:
        assert len({cell.model for cell in cells if cell.schedule == schedule}) >= 3, schedule
    for model in ZOO:
        assert len({cell.schedule for cell in cells if cell.model == model}) == 3, model
    assert set(SCHEDULES) | NOT_YET == set(schedules.by_name)


GPU_CELLS = [
    nightly(Cell(model, name, *counts))
    for model in ZOO
    for name, counts in (("one_f_one_b", (3, 2)), ("zb_v", (2, 5)))
]


@pytest.mark.parametrize("cell", [Cell("padding_mask", "zb_v", 2, 5), *GPU_CELLS], ids=str)
def test_every_bit_on_gpus(gpus: FakeCuda, cell: Cell) -> None:
    cell.check("cuda")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ZOO)
def test_the_whole_matrix(model: str, schedule: str) -> None:
    cells = list(cells_of(model, schedule))
    assert cells
    failures = {}
    for cell in cells:
        try:
            cell.check()
        except Exception as error:
            failures[str(cell)] = repr(error)
    assert failures == {}

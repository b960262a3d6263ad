"""A loss outside of the pipeline leads to the gradients of the plain model, bit for bit."""

import pytest

from tests.diagonal import nightly
from tests.fake_cuda.fake import FakeCuda

from .cells import DEVICES, MICROBATCHES, ZOO, Cell, cells_of

# Not those whose loss combines rows with a number that the pipeline has already put together.
MODELS = [model for model in ZOO if model not in ("top_k", "sparse")]
SCHEDULES = ("gpipe", "breadth_first", "searched", "interleaved", "zb_v", "one_f_one_b")

# The warning is of reentrant checkpointing, where nothing trains.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
# The others are for the night.
BY_DAY = ("u_net", "tied_embedding", "in_place")
ON_GPUS = [
    cell if model in BY_DAY else nightly(cell)
    for model in MODELS
    for cell in (Cell(model, "one_f_one_b", 3, 2), Cell(model, "zb_v", 2, 5))
]


def diagonal() -> list[Cell]:
    """For each model one schedule, with the next counts that it takes."""
    found: list[Cell] = []
    for number, model in enumerate(MODELS):
        cells = list(cells_of(model, SCHEDULES[number % len(SCHEDULES)]))
        found.append(cells[5 * number % len(cells)])
    return found


@pytest.mark.parametrize("cell", diagonal(), ids=str)
def test_a_loss_outside_leads_to_the_same_gradients(cell: Cell) -> None:
    cell.check_outside()


def test_the_part_has_all_of_each() -> None:
    cells = diagonal()
    assert {cell.num_devices for cell in cells} == set(DEVICES)
    assert {cell.num_microbatches for cell in cells} == set(MICROBATCHES)


@pytest.mark.parametrize("cell", ON_GPUS, ids=str)
def test_it_does_on_gpus(gpus: FakeCuda, cell: Cell) -> None:
    cell.check_outside("cuda")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_matrix(model: str, schedule: str) -> None:
    for cell in cells_of(model, schedule):
        cell.check_outside()

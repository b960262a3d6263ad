"""What torch refuses is refused, with the same type of error and a text that names the value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.interop.cases import CPU, OURS, TORCH, Library, batch, make, parts

pytestmark = pytest.mark.usefixtures("_group_of_one")

Misuse = Callable[[Library], Any]


def no_gradients(library: Library) -> None:
    x, y = batch()
    with torch.no_grad():
        make(library, "LoopedBFS", parts(2)).step(x, target=y)


def too_few_rows(library: Library) -> None:
    make(library, "Interleaved1F1B", parts(1), loss_fn=None).step(batch(3)[0])


def unnamed_keyword(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2)).step(x, target=y, mask=x)


def losses_of_another_type(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2)).step(x, target=y, losses=())


def losses_without_a_loss(library: Library) -> None:
    x, _ = batch()
    make(library, "LoopedBFS", parts(1), loss_fn=None).step(x, losses=[])


def no_target(library: Library) -> None:
    make(library, "LoopedBFS", parts(2)).step(batch()[0])


def loss_of_many_numbers(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2), loss_fn=lambda output, target: output - target).step(
        x, target=y
    )


def loss_that_trains_nothing(library: Library) -> None:
    x, y = batch()
    make(library, "LoopedBFS", parts(2), loss_fn=lambda output, target: target.mean()).step(
        x, target=y
    )


MISUSES: dict[str, tuple[Misuse, type[Exception], str]] = {
    "index": (
        lambda library: library.names.PipelineStage(parts(1)[0], 2, 2, CPU),
        ValueError,
        "stage_index is 2; with num_stages=2 it is 0 to 1",
    ),
    "name": (lambda library: library.schedule("2F2B"), ValueError, "'2F2B' is unknown"),
    "V of four": (
        lambda library: make(library, "ZBVZeroBubble", parts(3)),
        ValueError,
        "gives",
    ),
    "too few microbatches": (
        lambda library: make(library, "DualPipeV", parts(2), count=1),
        ValueError,
        "num_microbatches must be at least 2",
    ),
    "gradients": (no_gradients, RuntimeError, "call eval"),
    "rows": (too_few_rows, ValueError, "n_microbatches is 4.* only 3 rows"),
    "keyword": (unnamed_keyword, TypeError, "'mask', which no stage's forward names"),
    "losses": (losses_of_another_type, TypeError, "losses is a tuple"),
    "no loss": (losses_without_a_loss, RuntimeError, "has no loss_fn"),
    "no target": (no_target, RuntimeError, "needs target="),
    "loss": (loss_of_many_numbers, RuntimeError, r"one number .* got \(2, 6\)"),
    "constant": (loss_that_trains_nothing, RuntimeError, "depends on nothing that trains"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    misuse, expected, text = MISUSES[name]
    with pytest.raises(expected, match=text):
        misuse(OURS)
    with pytest.raises(expected):
        misuse(TORCH)

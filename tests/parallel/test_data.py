"""Data parallel over processes: the bits of one process that has all batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import peers
from tests.diagonal import diagonal
from tests.parallel import data_runs
from tests.parallel.data_runs import NUM_MICROBATCHES, pipeline
from tests.parallel.reference import batch_of, expected
from tests.support.comparison import assert_near_training, assert_same_training

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)


def ten_steps(
    rank: int, rows: Sequence[int], optimizer: Any, options: dict[str, Any], every: int = 1
) -> tuple[list[Tensor], dict[str, Tensor]]:
    return data_runs.ten_steps(
        rank, rows, lambda pipe: optimizer(pipe.parameters()), options, every
    )


@pytest.mark.parametrize(
    ("options", "optimizer"),
    diagonal(
        [
            {"schedule": "gpipe"},
            {"schedule": "one_f_one_b"},
            {"schedule": "zb_h1"},
            {"schedule": "interleaved", "num_chunks": 2},
            {"schedule": "hanayo", "waves": 1},
            {"schedule": "one_f_one_b", "recompute": "stage"},
        ],
        [SGD, ADAM],
    ),
)
def test_two_processes_train_as_one_bit_for_bit(options: dict[str, Any], optimizer: Any) -> None:
    rows = (8, 8)
    found = peers.run(2, ten_steps, rows, optimizer, options)
    wanted = expected(rows, NUM_MICROBATCHES, optimizer)
    for of_process in found:
        assert_same_training(of_process, wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_processes_with_other_numbers_of_rows_count_by_them(reduction: str) -> None:
    rows = (7, 2)
    found = peers.run(2, ten_steps, rows, SGD, {"reduction": reduction})
    wanted = expected(rows, NUM_MICROBATCHES, SGD, reduction=reduction)
    for of_process in found:
        assert_same_training(of_process, wanted)


def gradients_of_a_step(rank: int, grouped: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    group = dist.group.WORLD if grouped else None
    with pipeline(reduction="sum", process_group=group, **options) as pipe:
        x, y = batch_of(0, rank, 8)
        pipe.step(x, target=y)
        return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "chimera"},
        {"schedule": "dualpipe_v"},
        {"schedule": "v_half"},
        {"schedule": "one_f_one_b", "check_finite": "grads"},
        {"schedule": "gpipe", "recompute": "layer", "deferred_batch_norm": True},
    ],
)
def test_the_sum_is_of_what_each_process_has_alone(options: dict[str, Any]) -> None:
    first, second = peers.run(2, gradients_of_a_step, False, options)
    for of_process in peers.run(2, gradients_of_a_step, True, options):
        assert of_process.keys() == first.keys()
        for name, gradient in of_process.items():
            assert torch.equal(gradient, first[name] + second[name]), name


def test_four_processes_agree_and_are_near() -> None:
    """The order in which four sums are added is gloo's own."""
    rows = (5, 8, 3, 8)
    found = peers.run(4, ten_steps, rows, SGD, {})
    # Each gradient is off by at most three roundings of a sum of four, and ten steps of this rate
    # add these up; a gradient here is below one.
    assert_near_training(found, expected(rows, NUM_MICROBATCHES, SGD), 10 * 3 * 2**-24 * 10)

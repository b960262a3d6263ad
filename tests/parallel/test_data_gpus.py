"""Data parallel where each process has GPUs, on the fake driver."""

from functools import partial
from typing import Any

import pytest
import torch

from tests import peers
from tests.fake_cuda.host_gpus import host_gpus
from tests.parallel.reference import expected
from tests.parallel.test_data import ten_steps
from tests.support.comparison import assert_same_training

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def on_gpus(rank: int, rows: tuple[int, ...], options: dict[str, Any]) -> Any:
    with host_gpus(2):
        return ten_steps(rank, rows, SGD, {"devices": ["cuda:0", "cuda:1"], **options})


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "interleaved"])
def test_two_processes_of_two_gpus_train_as_one_bit_for_bit(schedule: str) -> None:
    rows = (8, 6)
    found = peers.run(2, on_gpus, rows, {"schedule": schedule})
    wanted = expected(rows, 4, SGD)
    for of_process in found:
        assert_same_training(of_process, wanted)

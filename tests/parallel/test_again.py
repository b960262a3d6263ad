"""Pipelines over a group one after another: each is as the first."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import peers
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of


def one_after_another(rank: int, closes: tuple[bool, bool]) -> list[Tensor]:
    found, kept = [], []
    for _ in range(3):
        pipe = pipeline()
        # The other process has made the next one's groups before this one has closed its own.
        time.sleep(0.2 * rank)
        x, y = batch_of(0, rank, 8)
        found.append(pipe.step(x, target=y))
        if closes[rank]:
            pipe.close()
        else:
            kept.append(pipe)
    # Closed pipelines are not in the way of the end.
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("closes", [(True, True), (True, False)])
def test_a_pipeline_that_was_closed_can_be_made_again(closes: tuple[bool, bool]) -> None:
    for found in peers.run(2, one_after_another, closes, group_timeout_s=5):
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])

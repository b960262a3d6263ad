"""Streams of shards: outputs are those of calls, in whichever order processes come to them."""

import time
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from pykern.tensors.dtensor import whole
from tests import peers
from tests.parallel.sharded import STYLES, batch_of, layers, mesh_of, pipeline

# Processes take seconds to begin with DTensors.
pytestmark = pytest.mark.slow


class Late(nn.Module):
    """Comes late for every third call in one process, for every fourth in another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.turns = cycle([0.002] + (2 + rank) * [0.0])

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(next(self.turns))
        return x


def streamed(rank: int, schedule: str) -> bool:
    chain = layers()
    chain[1:1] = [Late(rank)]
    # The head hands on a DTensor, which `whole` gathers while later batches may run.
    styles = {**STYLES, "8": ColwiseParallel(use_local_output=False)}
    mesh = mesh_of(2)
    options = {"schedule": schedule, "tensor_parallel": (mesh, styles)}
    with pipeline(mesh, chain, **options) as pipe, torch.no_grad():
        x, _ = batch_of(0)
        output = whole(pipe(x))
        return all(torch.equal(whole(one), output) for one in pipe.stream(x for _ in range(30)))


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
def test_a_stream_has_the_bits_of_calls(schedule: str) -> None:
    assert peers.run(2, streamed, schedule) == [True, True]

"""An interrupt at any line of a stream: it ends, nothing hangs, and the pipeline goes on."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern.runtime.in_order import InOrder
from tests.diagonal import nightly
from tests.interrupts import at_every_line

BATCHES = [torch.full((rows, 3), float(rows)) for rows in (4, 2, 3, 4)]


def whole(pipe: pykern.Pipeline, streams: list[InOrder]) -> Callable[[], object]:
    def act() -> object:
        streams.append(pipe.stream(BATCHES))
        return list(streams[-1])

    return act


def closed(pipe: pykern.Pipeline, streams: list[InOrder]) -> Callable[[], object]:
    """Only the end of one, with batches under way."""
    streams.append(pipe.stream(iter(lambda: BATCHES[0], None)))
    next(streams[-1])
    return streams[-1].close


@pytest.mark.parametrize(
    ("part", "stride"), [(whole, 13), nightly(whole, 1), (closed, 3), nightly(closed, 1)]
)
def test_a_stream_ends_whatever_line_an_interrupt_comes_at(
    part: Callable[[pykern.Pipeline, list[InOrder]], Callable[[], object]], stride: int
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    streams: list[InOrder] = []
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        expected = list(pipe.stream(BATCHES))
        loss = pipe.step(BATCHES[0], target=BATCHES[0])
        pipe.zero_grad()

        def check(where: str) -> None:
            # The caller has it still, and may close it once more.
            while streams:
                streams.pop().close()
            pipe.zero_grad()
            assert torch.equal(pipe.step(BATCHES[0], target=BATCHES[0]), loss), where
            assert all(map(torch.equal, pipe.stream(BATCHES), expected)), where

        assert at_every_line(lambda: part(pipe, streams), check, stride) > 10

"""A stage's gradients are on their way while other stages still compute."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from pykern.plan import Kind
from tests import peers

WIDTH = 256


class Slow(nn.Module):
    """Takes its time in a backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y.register_hook(lambda gradient: time.sleep(self.seconds))
        return y


def timed(rank: int) -> Any:
    """The first of two stages ends long after the second."""
    model = nn.Sequential(Slow(0.2), Slow(0.01))
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        x = torch.randn(4, WIDTH)
        pipe.step(x, target=x)
        timeline, reductions = pipe.timeline(), pipe.reductions()
    ends = [row[-1].end_ns for row in timeline.rows]
    launched = [[span for span in row if span.action.kind is Kind.REDUCE] for row in timeline.rows]
    return ends, launched, reductions.rows


def test_the_last_stages_sum_is_over_before_the_first_stage_has_ended() -> None:
    for ends, launched, rows in peers.run(2, timed):
        assert [[span.action for span in row] for row in rows] == [
            [span.action for span in row] for row in launched
        ]
        (first,), (last,) = rows
        assert last.start_ns == launched[1][0].start_ns
        assert last.end_ns - last.start_ns > 0
        assert last.end_ns < ends[0]
        assert first.start_ns >= launched[0][0].start_ns

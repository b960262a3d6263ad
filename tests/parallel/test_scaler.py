"""Gradient scaling in data-parallel processes: all leave out the same steps, by one scale."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import pykern
from tests import peers
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of
from tests.support.comparison import assert_same_tensors

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCALE = 2.0**10
ROWS = (7, 4)


def scaled(rank: int, every: int, is_scaled: bool) -> tuple[float, dict[str, Tensor]]:
    """Six steps, an update after each `every` of them.

    Values that are not finite are in the third step, in the second process alone; without a scaler
    the steps of that update are left out.
    """
    with pipeline() as pipe:
        optimizer = SGD(pipe.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=is_scaled)
        for number in range(6):
            if not is_scaled and number // every == 2 // every:
                continue
            x, y = batch_of(number, rank, ROWS[rank])
            if number == 2 and rank == 1:
                x[0, 0] = torch.inf
            is_last = (number + 1) % every == 0
            with nullcontext() if is_last else pipe.no_sync():
                pipe.step(x, target=y, scaler=scaler)
            if is_last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return scaler.get_scale(), {name: p.detach() for name, p in pipe.named_parameters()}


@pytest.mark.parametrize("every", [1, 2])
def test_all_processes_leave_out_an_update_that_is_not_finite_in_one(every: int) -> None:
    (_, wanted), _ = peers.run(2, scaled, every, False)
    for scale, parameters in peers.run(2, scaled, every, True):
        assert scale == SCALE / 2
        assert_same_tensors(parameters, wanted)


def scaled_apart(rank: int, other: float | None) -> tuple[str, Tensor]:
    """One step in which the second process has another scale, and then one that is right."""
    x, y = batch_of(0, rank, ROWS[rank])
    with pipeline() as pipe:
        right, wrong = (torch.amp.GradScaler("cpu", init_scale=s or 1.0) for s in (SCALE, other))
        given: Any = right
        if rank == 1:
            given = None if other is None else wrong
        with pytest.raises(pykern.PeerError) as caught:
            pipe.step(x, target=y, scaler=given)
        assert all(p.grad is None for p in pipe.parameters())
        return str(caught.value), pipe.step(x, target=y, scaler=right)


@pytest.mark.parametrize(("other", "shown"), [(None, "1"), (2.0**12, "4096")])
def test_processes_with_other_scales_are_refused(other: float | None, shown: str) -> None:
    (first, loss), (second, same) = peers.run(2, scaled_apart, other)
    assert first.startswith(
        f"this step scales its loss by 1024 here and by {shown} in process 1 of the group. Give "
        "step a scaler in every process"
    )
    assert second.startswith(f"this step scales its loss by {shown} here and by 1024 in process 0")
    assert torch.equal(loss, same)

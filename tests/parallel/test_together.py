"""Features around the sums over processes: losses that train, running statistics, memory."""

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from tests import peers
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of
from tests.parallel.test_faults import Trigger, fail, step


class TrainedLoss(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output @ self.weight, target)


def with_a_trained_loss(rank: int) -> Any:
    with pytest.raises(
        ValueError,
        match="loss_fn must train parameters of the model alone, whose gradients processes sum, "
        "got one that trains others",
    ):
        pipeline(loss_fn=TrainedLoss(nn.Parameter(torch.eye(6))))
    torch.manual_seed(0)
    last = nn.Linear(6, 6)
    model = nn.Sequential(nn.Linear(6, 6), last)
    # Parameters of the last stage are summed with it.
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=TrainedLoss(last.weight),
        process_group=dist.group.WORLD,
    ) as pipe:
        step(pipe, 0, rank)
    return last.weight.grad


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    first, second = peers.run(2, with_a_trained_loss)
    assert torch.equal(first, second)


def with_running_statistics(rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    trigger, norm = Trigger(), nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), trigger)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        deferred_batch_norm=True,
        process_group=dist.group.WORLD,
    ) as pipe:
        if rank == 1:
            trigger.calls[3] = lambda: fail("no more")
        with pytest.raises(ArithmeticError if rank == 1 else pykern.PeerError, match="no more"):
            step(pipe, 0, rank)
        found = [each.clone() for each in norm.buffers()]
        step(pipe, 0, rank)
        assert norm.num_batches_tracked == 1
    return found


def test_a_step_that_fails_elsewhere_leaves_running_statistics() -> None:
    for found in peers.run(2, with_running_statistics):
        assert all(map(torch.equal, found, nn.BatchNorm1d(6).buffers()))


def held_after_a_step(rank: int) -> int:
    with pykern.Pipeline(
        nn.Sequential(*[nn.Linear(300, 300) for _ in range(4)]),
        devices="cpu:2",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        x, y = batch_of(0, rank, 4, 300)
        pipe.step(x, target=y)
        pipe.zero_grad()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return max(each.numel() for each in tensors)


def test_no_copy_of_gradients_outlives_a_step() -> None:
    assert max(peers.run(2, held_after_a_step)) < 300 * 300


@dataclass(frozen=True)
class Frozen(Exception):
    """Nothing of it may be assigned to, its traceback included."""


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this cannot be shown")


def failing_with(rank: int, error: Exception) -> str:
    trigger = Trigger()
    torch.manual_seed(0)
    with pykern.Pipeline(
        nn.Sequential(nn.Linear(6, 6), trigger, nn.Linear(6, 6)),
        devices="cpu:2",
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:

        def raise_it() -> None:
            raise error

        if rank == 1:
            trigger.calls[0] = raise_it
        with pytest.raises(type(error) if rank == 1 else pykern.PeerError) as raised:
            step(pipe, 0, rank)
        assert torch.isfinite(step(pipe, 1, rank))
        return str(raised.value) if rank == 0 else ""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Silent(), "Silent"),
        (ValueError("file \udcff"), r"file \udcff"),
        (Frozen(), "Frozen: "),
    ],
)
def test_errors_that_cannot_be_shown_are_told(error: Exception, told: str) -> None:
    assert told in peers.run(2, failing_with, error)[0]

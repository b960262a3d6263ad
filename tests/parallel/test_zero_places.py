"""State in other processes, or on the host, where each process has several devices."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from pykern import HostOptimizer
from tests import peers
from tests.fake_cuda.host_gpus import host_gpus
from tests.parallel.data_runs import NUM_MICROBATCHES, pipeline
from tests.parallel.reference import batch_of, expected, train
from tests.parallel.test_zero import ADAM, SGD, ten_steps
from tests.support.comparison import assert_near_training, assert_same_training

GPUS = {"devices": ["cuda:0", "cuda:1"]}


def shared_out_on_gpus(rank: int, rows: tuple[int, ...], options: dict[str, Any]) -> Any:
    with host_gpus(2):
        return ten_steps(rank, rows, ADAM, {**GPUS, **options})


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
def test_two_processes_of_two_gpus_share_out_their_state(schedule: str) -> None:
    rows = (8, 6)
    found = peers.run(2, shared_out_on_gpus, rows, {"schedule": schedule})
    wanted = expected(rows, NUM_MICROBATCHES, partial(torch.optim.AdamW, lr=0.01))
    for of_process in found:
        assert_same_training(of_process, wanted)


def on_the_host(
    rank: int, rows: tuple[int, ...], optimizer: Any, options: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """With sums over processes, which are there when the step has ended."""
    kind, defaults = optimizer
    with pipeline(process_group=dist.group.WORLD, **options) as pipe:
        ours = HostOptimizer(pipe, kind, **defaults)

        def step(number: int) -> Tensor:
            x, y = batch_of(number, rank, rows[rank])
            loss = pipe.step(x, target=y)
            pykern.clip_grad_norm_(pipe.parameters(), 1e9)
            return loss

        losses = train(step, ours, 10)
        return losses, {name: value.detach() for name, value in pipe.named_parameters()}


def on_the_host_beside_gpus(rank: int, rows: tuple[int, ...], optimizer: Any) -> Any:
    with host_gpus(2):
        return on_the_host(rank, rows, optimizer, GPUS)


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_two_processes_that_step_on_the_host_train_as_one(optimizer: Any) -> None:
    rows = (8, 5)
    wanted = expected(rows, NUM_MICROBATCHES, partial(optimizer[0], **optimizer[1]))
    for of_process in peers.run(2, on_the_host, rows, optimizer, {"schedule": "zb_h1"}):
        assert_same_training(of_process, wanted)
    for of_process in peers.run(2, on_the_host_beside_gpus, rows, optimizer):
        assert_same_training(of_process, wanted)


def test_four_processes_that_step_on_the_host_agree_and_are_near() -> None:
    """The order in which four sums are added is gloo's own."""
    rows = (5, 8, 3, 8)
    found = peers.run(4, on_the_host, rows, SGD, {})
    wanted = expected(rows, NUM_MICROBATCHES, partial(SGD[0], **SGD[1]))
    # As in the test of four processes that share out their state.
    assert_near_training(found, wanted, 10 * 3 * 2**-24 * 10)


def two_models(rank: int) -> int:
    """Each with an optimizer of its own over the same group."""
    first, second = pipeline(), pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizers = [pykern.ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1) for pipe in (first, second)]
    for number in range(3):
        x, y = batch_of(number, rank, 8)
        for pipe, optimizer in zip((first, second), optimizers, strict=True):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
    first.close()
    second.close()
    return sum(len(optimizer._owned) for optimizer in optimizers)


def test_two_pipelines_share_out_their_states() -> None:
    assert sum(peers.run(2, two_models)) == 16 + 4

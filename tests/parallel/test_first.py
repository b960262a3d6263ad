"""All processes take the measurements of the first."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pykern
from pykern.parallel.data import data
from pykern.parallel.peers.first import of_first
from pykern.parallel.peers.groups import group_of, lane_groups
from pykern.plan import Kind
from tests import peers
from tests.parallel import data_runs
from tests.parallel.reference import batch_of, layers
from tests.parallel.sharded import STYLES
from tests.parallel.sharded import layers as blocks

pipeline = partial(data_runs.pipeline, microbatches=2)


class Slow(nn.Module):
    """Takes as long as it is told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.inner(x)


def slow(place: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Slow(0.02 * (number == place)) for number in range(5)]


def cut_by_time(rank: int) -> tuple[list[int], Tensor]:
    """In the first process the first layer takes long, in the other one the last does."""
    with pipeline(slow(4 * rank), balance="time", sample=torch.ones(2, 6)) as pipe:
        x = torch.ones(4, 6)
        loss = pipe.step(x, target=x)
        return [len(stage) for stage in pipe.partition.stages], loss


def test_all_are_cut_by_the_times_of_the_first() -> None:
    found = peers.run(2, cut_by_time)
    for counts, loss in found:
        assert counts == [1, 4]
        assert torch.equal(loss, found[0][1])


def fitted(rank: int) -> tuple[str, Tensor]:
    """With less memory than the fastest levels need."""
    x, y = batch_of(0, rank, 8)
    chain = layers(num_layers=10)
    with pipeline(chain, recompute=pykern.Budget(1e9, x[:4], y[:4])) as pipe:
        assert pipe.fitted is not None
        needed = max(pipe.fitted.peak_bytes)
    with pipeline(chain, recompute=pykern.Budget(0.8 * needed, x[:4], y[:4])) as pipe:
        assert pipe.fitted is not None
        assert pipe.fitted.plan.has(Kind.R)
        return str(pipe.fitted), pipe.step(x, target=y)


def test_all_take_the_levels_that_the_first_has_chosen() -> None:
    (first, loss), (second, other) = peers.run(2, fitted)
    assert first == second
    assert torch.equal(loss, other)


def cut_in_shards(_: int) -> tuple[list[int], Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pipeline(
        blocks(),
        process_group=None,
        tensor_parallel=(mesh["tp"], STYLES),
        balance="time",
        sample=torch.ones(2, 4),
    ) as pipe:
        loss = pipe.step(torch.ones(4, 4), target=torch.ones(4, 2))
        return [len(stage) for stage in pipe.partition.stages], loss


def test_shards_are_cut_by_the_times_of_the_first() -> None:
    (first, loss), (second, other) = peers.run(2, cut_in_shards)
    assert first == second
    assert torch.equal(loss, other)


def budget_of_shards(_: int) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    budget = pykern.Budget(1e9, torch.ones(2, 4), torch.ones(2, 2))
    with pytest.raises(
        ValueError, match="recompute must be levels with tensor_parallel, got a Budget"
    ) as caught:
        pipeline(
            blocks(), process_group=None, tensor_parallel=(mesh["tp"], STYLES), recompute=budget
        )
    return str(caught.value)


def test_a_budget_of_shards_is_refused() -> None:
    peers.run(2, budget_of_shards)


def failing(rank: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        pipeline(layers(), balance="time", sample=torch.ones(2, 3 if rank == 0 else 6))
    assert isinstance(caught.value, pykern.PeerError) == (rank == 1)
    with pipeline(layers(), balance="time", sample=torch.ones(2, 6)):
        return str(caught.value)


def test_where_the_first_cannot_measure_all_are_told_and_may_try_again() -> None:
    mine, told = peers.run(2, failing)
    assert "mat1 and mat2" in mine
    # torch 2.15 names the operation first.
    assert re.match(
        "the first process .* before its first step: RuntimeError: (addmm: )?mat1", told
    )


def made_late(rank: int, marker: Path) -> bool:
    """Whether the last process has its groups when this one's pipeline is made, and may close."""
    found = lane_groups

    def late(*arguments: Any) -> Any:
        groups = found(*arguments)
        time.sleep(0.5)
        marker.touch()
        return groups

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(data, "lane_groups", late)
        with pipeline(layers()):
            return marker.exists()


def test_no_process_goes_on_before_all_have_their_groups(tmp_path: Path) -> None:
    assert peers.run(2, made_late, tmp_path / "made") == [True, True]


def never_comes(rank: int) -> None:
    if rank == 1:
        time.sleep(4)
    else:
        pipeline(layers(), balance="time", sample=torch.ones(2, 6))


def test_who_does_not_come_is_waited_for_as_long_as_the_group_says() -> None:
    error, _ = peers.outcomes(2, never_comes, group_timeout_s=2)
    assert isinstance(error, pykern.PeerError)
    assert "a process of the group has not made its pipeline within 2 s, or is gone:" in str(error)


def of_a_mesh(rank: int) -> tuple[int, list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = [group_of(mesh[name], name) for name in ("dp", "tp")]
    looked: list[int] = []

    def look() -> int:
        looked.append(rank)
        return 10 + rank

    return of_first(groups, look, int), looked


def test_of_a_mesh_one_process_looks() -> None:
    found = peers.run(4, of_a_mesh)
    assert [value for value, _ in found] == [10] * 4
    assert [looked for _, looked in found] == [[0], [], [], []]


def test_alone_everybody_is_the_first() -> None:
    assert of_first([], lambda: 3, int) == 3

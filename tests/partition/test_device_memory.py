"""Devices of unequal memory: cuts whose stages fit, with the exact best of them."""

import random
from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from pykern.partition import partition
from pykern.partition.bottleneck import Limit, ends_for_speeds, spans_of
from pykern.partition.profile import bytes_held
from pykern.partition.unequal import improved, stage_memory
from pykern.plan import with_replicas
from pykern.schedules import by_name

WIDTH, NUM_LAYERS, ROWS = 16, 8, 4


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[range, ...]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [spans_of([*ends, num_layers]) for ends in inner]


def slowest(costs: Sequence[int], cut: Sequence[range], speeds: Sequence[float]) -> float:
    return max(sum(costs[i] for i in of) / speed for of, speed in zip(cut, speeds, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_the_slowest_stage_is_the_fastest_of_all_cuts_that_fit(seed: int) -> None:
    draw = random.Random(seed)
    num_stages = draw.randint(1, 4)
    num_layers = draw.randint(num_stages, 9)
    costs = [draw.randint(0, 20) for _ in range(num_layers)]
    held = [draw.randint(0, 20) for _ in range(num_layers)]
    speeds = [draw.choice([0.25, 0.6, 1.0, 3.0]) for _ in range(num_stages)]
    limit = Limit([0, *accumulate(held)], [draw.randint(5, 60) for _ in range(num_stages)])
    fitting = [cut for cut in all_cuts(num_layers, num_stages) if limit.kept_by(cut)]
    if not fitting:
        with pytest.raises(ValueError, match="memory must hold"):
            ends_for_speeds(costs, speeds, [limit])
        return
    found = spans_of(ends_for_speeds(costs, speeds, [limit]))
    assert limit.kept_by(found)
    assert slowest(costs, found, speeds) == min(slowest(costs, cut, speeds) for cut in fitting)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]


def pipeline(devices: list[Any], balance: Any, **more: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        layers(),
        **{
            "devices": devices,
            "microbatches": 2,
            "loss_fn": nn.functional.mse_loss,
            "sample": torch.ones(ROWS, WIDTH),
            "balance": balance,
            **more,
        },
    )


def of_each(num_stages: int) -> int:
    """The bytes of a layer, as balance "memory" counts them."""
    first, *_ = bytes_held(layers()[1:], torch.ones(ROWS, WIDTH), num_stages)
    return first


def lengths(cut: pykern.partition.Partition) -> list[int]:
    return [len(stage) for stage in cut.stages]


def test_stages_share_out_the_memory_by_that_of_their_devices() -> None:
    one = of_each(2)
    devices = [pykern.Device("cpu", memory=20 * one), pykern.Device("cpu", memory=60 * one)]
    with pipeline(devices, "memory") as pipe:
        assert lengths(pipe.partition) == [2, 6]
        x = torch.randn(4, WIDTH)
        expected = nn.functional.mse_loss(nn.Sequential(*layers())(x), x).detach()
        torch.testing.assert_close(pipe.step(x, target=x), expected)


def test_stages_of_equal_time_fit_their_devices() -> None:
    one = of_each(2)
    with pipeline(["cpu", pykern.Device("cpu", memory=2.5 * one)], "time") as pipe:
        assert lengths(pipe.partition) == [6, 2]
    with pipeline(["cpu", pykern.Device("cpu", memory=100 * one)], "time") as pipe:
        # Times of equal layers are measured, so a boundary may be one layer off.
        assert abs(len(pipe.partition.stages[0]) - NUM_LAYERS / 2) <= 2


def test_moves_for_the_plan_keep_the_memory() -> None:
    """Without it they give the fast device more."""
    plan, speeds = by_name["one_f_one_b"](2, 2), [1.0, 4.0]
    one = of_each(2)
    sample, memory = torch.ones(ROWS, WIDTH), [float("inf"), 3.5 * one]
    cut = partition(layers(), 2, "time", sample, speeds, memory)
    assert lengths(cut) == [5, 3]
    assert lengths(improved(cut, plan, speeds)) == [5, 3]
    free = partition(layers(), 2, "time", sample, speeds)
    assert len(improved(free, plan, speeds).stages[1]) > 3


def test_stages_of_one_device_share_its_memory() -> None:
    memory = [8.0, 4.0]
    assert stage_memory(by_name["one_f_one_b"](2, 2), memory) == [8.0, 4.0]
    assert stage_memory(by_name["interleaved"](2, 2, num_chunks=2), memory) == [4.0, 2.0, 4.0, 2.0]
    four = with_replicas(by_name["one_f_one_b"](2, 2), 2)
    assert stage_memory(four, [8.0, 4.0, 6.0, 10.0]) == [6.0, 4.0]


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [("24GiB", 24 * 2**30), ("1.5 GB", 1.5e9), ("512MiB", 2**29), ("80MB", 8e7), (1000, 1000)],
)
def test_memory_is_bytes_or_has_a_unit(memory: Any, num_bytes: float) -> None:
    assert pykern.Device("cpu", memory=memory).num_bytes == num_bytes


@pytest.mark.parametrize("memory", [0, -1, float("inf"), float("nan"), "0GiB"])
def test_no_memory_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="memory must be a number of bytes above 0, got"):
        pykern.Device("cpu", memory=memory)


@pytest.mark.parametrize("memory", ["24", "24 TB", "GiB", True, [1]])
def test_other_texts_are_refused(memory: Any) -> None:
    with pytest.raises(TypeError, match="memory must be a number of bytes, or such as '24GiB'"):
        pykern.Device("cpu", memory=memory)


@pytest.mark.parametrize(
    "more", [{"balance": "parameters"}, {"balance": [4, 4]}, {"balance": None, "split_at": ["4"]}]
)
def test_a_cut_that_counts_no_bytes_is_refused(more: dict[str, Any]) -> None:
    devices = ["cpu", pykern.Device("cpu", memory="1GiB")]
    with pytest.raises(ValueError, match="memory of a device must go with balance='time' or"):
        pipeline(devices, **({"sample": None} | more))


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_too_little_memory_is_refused(balance: str) -> None:
    devices = [pykern.Device("cpu", memory=of_each(2))] * 2
    with pytest.raises(ValueError, match=r"memory must hold \d+ bytes in some cut into 2 stages"):
        pipeline(devices, balance)


@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize("memory", [[1e9], [1e9, 1e9, 2e9]])
def test_memory_for_other_stages_is_refused(balance: Any, memory: list[float]) -> None:
    """It raised an error of zip, or one about speeds."""
    with pytest.raises(ValueError, match="memory must have an entry for each of 2 stages, got"):
        partition(layers(), 2, balance, torch.ones(ROWS, WIDTH), memory=memory)


@pytest.mark.parametrize("balance", ["parameters", "layers", [4, 4], {"*": 1.0}])
def test_memory_without_bytes_is_refused(balance: Any) -> None:
    """It was ignored, or layers were run on None."""
    with pytest.raises(ValueError, match="memory must go with balance 'time' or 'memory', which"):
        partition(layers(), 2, balance, memory=[1e9, 1e9])


def test_tune_takes_devices_to_be_alike() -> None:
    x = torch.ones(ROWS, WIDTH)
    with pytest.raises(ValueError, match="devices must have no speed or memory of their own"):
        pykern.tune(
            layers(),
            sample=x,
            target=x,
            loss_fn=nn.functional.mse_loss,
            devices=["cpu", pykern.Device("cpu", memory="1GiB")],
        )

"""Devices of unequal speed: exact cuts, moved for the plan, and a bound that holds."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from pykern.partition import partition
from pykern.partition.bottleneck import balanced_ends, ends_for_speeds
from pykern.partition.unequal import bound_of, improved
from pykern.plan import Costs, Plan, simulate
from pykern.schedules import by_name

NAMES = ["gpipe", "one_f_one_b", "zb_h1", "interleaved", "hanayo", "zb_v", "chimera"]


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[range, ...]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(range(start, end) for start, end in pairwise([0, *inner, num_layers]))


def slowest(costs: Sequence[int], stages: Sequence[range], speeds: Sequence[float]) -> float:
    return max(sum(costs[i] for i in of) / speed for of, speed in zip(stages, speeds, strict=True))


def step_ns(
    plan: Plan, costs: Sequence[int], stages: Sequence[range], speeds: list[float]
) -> float:
    thirds = [sum(costs[i] for i in of) / 3 for of in stages]
    given = Costs(
        thirds,
        [2 * each for each in thirds],
        input_ns=thirds,
        weight_ns=thirds,
        device_speeds=speeds,
    )
    return simulate(plan, given).makespan_ns


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_is_the_fastest_of_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    num_stages = draw.randint(1, 5)
    num_layers = draw.randint(num_stages, 10)
    largest = draw.choice([1, 3, 1_000_000])
    costs = [draw.randint(0, largest) for _ in range(num_layers)]
    speeds = [draw.choice([0.1, 0.5, 0.6, 1.0, 1.0, 3.7]) for _ in range(num_stages)]
    ends = ends_for_speeds(costs, speeds)
    stages = [range(start, end) for start, end in pairwise([0, *ends])]
    assert all(stages)
    assert ends[-1] == num_layers
    best = min(slowest(costs, cut, speeds) for cut in all_cuts(num_layers, num_stages))
    assert slowest(costs, stages, speeds) == best


def test_equal_speeds_have_the_bottleneck_of_equal_devices() -> None:
    draw = random.Random(1)
    costs = [draw.randint(0, 9) for _ in range(60)]
    ones = [1.0] * 7

    def worst(ends: Sequence[int]) -> float:
        return slowest(costs, [range(*pair) for pair in pairwise([0, *ends])], ones)

    assert worst(ends_for_speeds(costs, ones)) == worst(balanced_ends(costs, 7))


@pytest.mark.parametrize("name", NAMES)
def test_no_cut_is_below_the_bound(name: str) -> None:
    draw = random.Random(name)
    for _ in range(6):
        num_devices = 2 if name == "chimera" else draw.randint(2, 3)
        plan = by_name[name](num_devices, 2 * draw.randint(1, 4))
        if plan.num_stages > 6:
            continue
        speeds = [draw.choice([0.25, 0.5, 1.0, 2.0]) for _ in range(num_devices)]
        costs = [draw.randint(0, 5) for _ in range(plan.num_stages + 2)]
        times = [step_ns(plan, costs, cut, speeds) for cut in all_cuts(len(costs), plan.num_stages)]
        assert bound_of(sum(costs), plan, speeds) <= min(times) * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [[1.0, 1.0, 0.5], [0.6, 1.0, 1.0], [1.0, 0.5, 0.25]])
def test_a_step_is_near_the_bound_and_better_than_of_equal_stages(speeds: list[float]) -> None:
    """A model of 96 equal layers under 1F1B."""
    plan = by_name["one_f_one_b"](3, 48)
    layers = [nn.Identity() for _ in range(96)]
    equal = partition(layers, 3, "layers")
    cut = improved(partition(layers, 3, "layers", speeds=speeds), plan, speeds)
    costs = [1] * 96
    takes = step_ns(plan, costs, cut.stages, speeds)
    assert takes <= 0.85 * step_ns(plan, costs, equal.stages, speeds)
    assert cut.above_bound is not None
    assert cut.above_bound == pytest.approx(takes / bound_of(96, plan, speeds) - 1)
    assert 0 <= cut.above_bound <= 0.05
    assert f"at most {cut.above_bound:.1%} above" in str(cut)
    assert equal.above_bound is None


def test_moves_make_a_step_no_longer_than_the_exact_cut() -> None:
    draw = random.Random(2)
    for _ in range(10):
        plan = by_name["interleaved"](2, 4)
        speeds = [draw.choice([0.3, 0.5, 1.0]), 1.0]
        prices = {str(number): draw.randint(1, 9) for number in range(12)}
        layers = {name: nn.Identity() for name in prices}
        of_stages = [speeds[stage % 2] for stage in range(4)]
        first = partition(layers, 4, prices, speeds=of_stages)
        moved = improved(first, plan, speeds)
        before, after = (
            step_ns(plan, cut.layer_costs, cut.stages, speeds) for cut in (first, moved)
        )
        assert after <= before
        assert moved.costs == tuple(sum(moved.layer_costs[i] for i in of) for of in moved.stages)
        assert sum(moved.parameters) == sum(first.parameters)


def pipeline(devices: Any, **options: Any) -> pykern.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(9)]
    options = {"balance": "layers", "microbatches": 8, **options}
    return pykern.Pipeline(layers, devices=devices, loss_fn=nn.functional.mse_loss, **options)


def test_a_pipeline_gives_a_slow_device_less_and_has_the_same_bits() -> None:
    x = torch.randn(16, 4)
    slow = ["cpu", pykern.Device("cpu", speed=0.25)]
    found = []
    for devices in (slow, ["cpu", pykern.Device("cpu")]):
        with pipeline(devices) as pipe:
            loss = pipe.step(x, target=x)
            counts = [len(stage) for stage in pipe.partition.stages]
            gradients = torch.cat(
                [one.grad.flatten() for one in pipe.parameters() if one.grad is not None]
            )
            found.append((counts, loss, gradients))
    (counts, loss, gradients), (equal, expected, others) = found
    assert (counts, equal) == ([8, 1], [4, 5])
    assert torch.equal(loss, expected)
    assert torch.equal(gradients, others)


def test_a_searched_plan_replicas_and_given_cuts() -> None:
    slow = [pykern.Device("cpu", speed=0.25), "cpu"]
    with pipeline(slow, schedule="auto") as pipe:
        # Stages may stand anywhere: the slow device has fewer layers in all.
        of_device = [0, 0]
        for stage, device in zip(
            pipe.partition.stages, pipe.plan.placement.replicas[0], strict=True
        ):
            of_device[device] += len(stage)
        assert of_device[0] < of_device[1]
        assert pipe.partition.above_bound is not None
    with pipeline(slow, balance="memory", sample=torch.ones(2, 4)) as pipe:
        assert [len(stage) for stage in pipe.partition.stages] == [4, 5]
    with pipeline(slow, balance=[5, 4]) as pipe:
        assert [len(stage) for stage in pipe.partition.stages] == [5, 4]
    with pipeline([*slow, *slow], replicas=2) as pipe:
        assert len(pipe.partition.stages[0]) < len(pipe.partition.stages[1])


@pytest.mark.parametrize("speed", [0, -1.0, float("inf"), float("nan")])
def test_speeds_that_are_none_are_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed must be a number above 0, got"):
        pykern.Device("cpu", speed=speed)


def test_wrong_arguments_are_refused() -> None:
    given: Any = 1
    with pytest.raises(TypeError, match="name must be a string such as 'cuda:1', or a torch"):
        pykern.Device(given)
    given = "fast"
    with pytest.raises(TypeError, match="speed must be a number above 0, got 'fast'"):
        pykern.Device("cpu", speed=given)
    with pytest.raises(ValueError, match="speeds must have an entry for each of 2 stages, got 3"):
        partition([nn.Identity()] * 3, 2, "layers", speeds=[1, 2, 3])
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="speeds must hold finite numbers above 0, got"):
            partition([nn.Identity()] * 3, 2, "layers", speeds=[1.0, speed])
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        pipeline([pykern.Device("gpu", speed=0.5)])
    x = torch.ones(4, 4)
    with pytest.raises(
        ValueError, match="devices must have no speed or memory of their own for tune"
    ):
        pykern.tune(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            sample=x,
            target=x,
            loss_fn=nn.functional.mse_loss,
            devices=["cpu", pykern.Device("cpu", speed=0.5)],
        )


@pytest.mark.parametrize("name", ["speeds", "memory"])
@pytest.mark.parametrize(
    ("given", "rule"), [("x", "a list of numbers or None, got 'x'"), (["x", 1], "a number, got")]
)
def test_speeds_and_memory_of_wrong_types_are_refused(name: str, given: Any, rule: str) -> None:
    """One letter was taken for the equal speed of all stages."""
    with pytest.raises(TypeError, match=f"{name} must be {rule}"):
        partition([nn.Identity(), nn.Identity()], 2, "layers", **{name: given})

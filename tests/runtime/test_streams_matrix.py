"""The streams of GPUs, on the fake driver, give what the CPU workers give, bit for bit."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern import schedules
from pykern.plan import Plan
from tests.diagonal import diagonal, nightly
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.conftest import expect_nothing_broken
from tests.runtime.models import CASES, Case, mlp
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned

# Updates within a step, and slices, need an executor that is not there yet.
NOT_YET = {"pipedream", "pipedream_2bw", "seq1f1b"}
SCHEDULES = sorted(schedules.by_name.keys() - NOT_YET - {"forward_only"})


def check_steps(case: Case, plan: Plan, devices: Any, batches: Sequence[int]) -> None:
    """Steps of these numbers of rows, with hooks of all parameters that train."""
    theirs = copy.deepcopy(case.layers)
    for parameter in (*case.layers.parameters(), *theirs.parameters()):
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * 0.5)
    with (
        case.pipeline(plan, devices) as pipe,
        planned(theirs, plan, case.loss_fn) as workers,
    ):
        for rows in batches:
            x, y = case.inputs[:rows], case.target[:rows]
            torch.manual_seed(rows)
            expected = workers.step(x, target=y)
            torch.manual_seed(rows)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, workers)


def another_model(gpus: FakeCuda) -> None:
    """Leftovers of one pipeline must not be taken for a fault of the next."""
    expect_nothing_broken(gpus)
    gpus.reset(8)
    gpus.allow_undeclared()


Counts = list[tuple[int, int]]
ALL_COUNTS = list(itertools.product((1, 2, 4, 8), (1, 4, 8)))
# Counts of devices and microbatches, with the least number of plans that any schedule has of them.
COUNTS = pytest.mark.parametrize(
    ("counts", "at_least"),
    [([(1, 1), (2, 4), (2, 8), (4, 8)], 2), nightly(ALL_COUNTS, 5)],
    ids=["few", "all"],
)


def plans_of(name: str, counts: Counts) -> Iterator[Plan]:
    """The schedule at the counts that it takes."""
    for num_devices, num_microbatches in counts:
        with contextlib.suppress(ValueError):
            yield schedules.by_name[name](num_devices, num_microbatches)


def partly_frozen(plan: Plan) -> Case:
    """A layer for each stage. The first and one in the middle do not train."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(plan.num_stages)))
    for frozen in {0, plan.num_stages // 2} - {plan.num_stages - 1}:
        layers[frozen].requires_grad_(False)
    x, y = torch.randn(2, plan.num_microbatches + 1, 4)
    return Case(layers, x, y, F.mse_loss)


@COUNTS
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_at_every_count(
    gpus: FakeCuda, name: str, counts: Counts, at_least: int
) -> None:
    num_plans = 0
    for plan in plans_of(name, counts):
        num_plans += 1
        names = [f"cuda:{device}" for device in range(plan.num_devices)]
        check_steps(partly_frozen(plan), plan, names, [plan.num_microbatches + 1])
        another_model(gpus)
    assert num_plans >= at_least


# Refused with a reason: stages that split some of their backwards, and replicas.
NOT_CAPTURED = {"dualpipe_v", "chimera"}


@COUNTS
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - NOT_CAPTURED))
def test_every_schedule_at_every_count_in_graph_mode(
    gpus: FakeCuda, name: str, counts: Counts, at_least: int
) -> None:
    num_plans = 0
    for plan in plans_of(name, counts):
        num_plans += 1
        check_replays(partly_frozen(plan), plan)
        assert gpus.calls("cuGraphLaunch") > 0
        another_model(gpus)
    assert num_plans >= at_least


def check_replays(case: Case, plan: Plan) -> None:
    """Steps of the same shapes, on other data each time."""
    theirs = copy.deepcopy(case.layers)
    x, y = torch.randn(2, 2 * plan.num_microbatches, 4)
    names = [f"cuda:{device}" for device in range(plan.num_devices)]
    with (
        case.pipeline(plan, names, capture=True) as pipe,
        planned(theirs, plan) as workers,
    ):
        for number in range(4):
            data = x.roll(number, 0)
            assert torch.equal(pipe.step(data, target=y), workers.step(data, target=y))
            assert_same_state(pipe, workers)


DEVICES: dict[str, Any] = {
    "four GPUs": [f"cuda:{gpu}" for gpu in range(4)],
    "two GPUs": ["cuda:1", "cuda:0"] * 2,
    "one GPU": ["cuda:0"] * 4,
    "parts": "cuda:0/4",
}


@pytest.mark.parametrize(
    ("name", "devices"), diagonal(["one_f_one_b", "interleaved", "zb_v", "chimera"], DEVICES)
)
def test_all_models_on_all_kinds_of_lanes(gpus: FakeCuda, name: str, devices: str) -> None:
    plan = schedules.by_name[name](4, 5)
    for model, make in CASES.items():
        # Running statistics are refused where there are replicas.
        if plan.placement.num_replicas > 1 and model == "cnn":
            continue
        check_steps(make(11), plan, DEVICES[devices], [11, 3])
        another_model(gpus)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_v", "chimera"])
def test_where_peers_are_out_of_reach_copies_go_by_way_of_the_host(
    gpus: FakeCuda, name: str
) -> None:
    # One way only between 0 and 1, not at all between 2 and 3.
    for device, peer in ((0, 1), (2, 3), (3, 2)):
        gpus.set_peer(device, peer, reachable=False)
    plan = schedules.by_name[name](4, 5)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 0 to 1, "):
        check_steps(CASES["structured"](11), plan, DEVICES["four GPUs"], [11, 3])


class Same(nn.Module):
    """Returns what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Flipped(nn.Module):
    """Its output is a view with strides of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Gaps(nn.Module):
    """Its output does not fill its memory."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)[..., ::2]


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


class Conjugated(nn.Module):
    """Its output is conjugated when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, 2 * x).conj()


class Imaginary(nn.Module):
    """Its output is negated when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        return x.imag


def flat() -> Case:
    layers = [layer for _ in range(2) for layer in (Same(), nn.Linear(4, 4), Flipped(), Gaps())]
    x, y = torch.randn(2, 9, 4, 4)
    return Case(nn.Sequential(*layers), x, y, F.mse_loss)


def images() -> Case:
    layers = [
        layer for _ in range(2) for layer in (ChannelsLast(), nn.Conv2d(3, 3, 1), Same(), nn.ReLU())
    ]
    x, y = torch.randn(2, 9, 3, 4, 4)
    return Case(nn.Sequential(*layers), x, y, F.mse_loss)


def lazy() -> Case:
    layers = [
        layer for _ in range(2) for layer in (nn.Linear(4, 4), Conjugated(), Imaginary(), Same())
    ]
    x, y = torch.randn(2, 9, 4)
    return Case(nn.Sequential(*layers), x, y, F.mse_loss)


def chain() -> Case:
    case = mlp(9)
    return Case(nn.Sequential(*case.layers, Same()), case.inputs, case.target, case.loss_fn)


# Growing, so that rings are replaced, and with fewer rows than microbatches.
BATCHES = [2, 5, 9, 3]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("make", [flat, images, lazy, chain])
def test_outputs_of_any_strides_and_stages_that_return_their_input(
    gpus: FakeCuda, make: Callable[[], Case], devices: str
) -> None:
    check_steps(make(), schedules.hanayo(4, 4, waves=1), DEVICES[devices], BATCHES)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("make", [flat, images, lazy, chain])
def test_a_forward_on_its_own(gpus: FakeCuda, make: Callable[[], Case], devices: str) -> None:
    case = make()
    plain = copy.deepcopy(case.layers).eval()
    with planned(case.layers, schedules.hanayo(4, 4, waves=1), None, DEVICES[devices]) as pipe:
        pipe.eval()
        for rows in BATCHES:
            output = pipe(case.inputs[:rows])
            with torch.no_grad():
                parts = [part for part in case.inputs[:rows].tensor_split(4) if len(part)]
                assert torch.equal(output, torch.cat([plain(part) for part in parts]))

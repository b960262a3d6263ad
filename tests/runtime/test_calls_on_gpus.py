"""The cost of called actions on GPUs, without a clock: the calls that a microbatch makes.

Counted are calls of pykern's functions, and calls of C's functions by them, such as torch's. A
number that falls may be lowered here; one that rises has to be found.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pykern
from pykern.plan import Action, Kind, Placement, Plan
from tests.fake_cuda.host_gpus import host_gpus
from tests.support.own_calls import is_own

WIDTH = 8


@contextmanager
def calls(into: Counter[str]) -> Iterator[None]:
    """Counts calls by their event: "call" of a function of ours, "c_call" by one."""

    def notice(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event in ("call", "c_call") and is_own(code):
            # Comprehensions have frames of their own in Pythons before 3.12.
            into[event] += not (event == "call" and code.co_name.endswith(("comp>", "genexpr>")))

    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(None)


class Operations(TorchDispatchMode):
    """Counts operations of torch, but for those that only look at memory in another way."""

    def __init__(self, into: Counter[str]) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.into[str(func)] += not func.is_view
        return func(*args, **(kwargs or {}))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def plan_of(num_devices: int, num_microbatches: int) -> Plan:
    """Two stages, on one device or on two, and one microbatch after another."""
    rows: list[list[Action]] = [[] for _ in range(num_devices)]
    for number in range(num_microbatches):
        for kind, stage in ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0)):
            rows[stage % num_devices].append(Action(kind, stage, number))
    return Plan(Placement(num_devices, [0, num_devices - 1]), num_microbatches, rows)


def counted(
    devices: list[str], num_microbatches: int, noticing: Callable[[Counter[str]], Any]
) -> Counter[str]:
    """The counts of the fourth step."""
    found: Counter[str] = Counter()

    def run() -> None:
        x, y = torch.randn(2, 2 * num_microbatches, WIDTH)
        with pykern.Pipeline(
            layers(),
            devices=devices,
            schedule=plan_of(len(devices), num_microbatches),
            loss_fn=F.mse_loss,
        ) as pipe:
            for _ in range(3):
                pipe.step(x, target=y)
            with noticing(found):
                pipe.step(x, target=y)

    # GPUs of their own: tensors of another pipeline may return at an address.
    with host_gpus(2):
        run()
    return found


def by_microbatch(devices: list[str], noticing: Callable[[Counter[str]], Any]) -> Counter[str]:
    """The counts of four microbatches more, for each of them."""
    more = counted(devices, 8, noticing)
    more.subtract(counted(devices, 4, noticing))
    assert not any(number % 4 for number in more.values()), more
    return Counter({name: number // 4 for name, number in more.items() if number})


# A microbatch has four actions. Two GPUs send two tensors for it, one forth and one back.
ONE, TWO = ["cuda:0"], ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("devices", "most"),
    [
        pytest.param(ONE, {"call": 29, "c_call": 21}, id="nothing sent"),
        pytest.param(TWO, {"call": 44, "c_call": 53}, id="two tensors sent"),
    ],
)
def test_a_microbatch_calls_no_more_than_it_needs(devices: list[str], most: dict[str, int]) -> None:
    found = by_microbatch(devices, calls)
    assert all(found[event] <= number for event, number in most.items()), found


@pytest.mark.parametrize(
    ("devices", "further"),
    [
        # The loss is added up.
        pytest.param(ONE, {"aten.add_.Tensor": 1}, id="nothing sent"),
        # A parameter may keep the gradient that has come.
        pytest.param(TWO, {"aten.add_.Tensor": 1, "aten.clone.default": 1}, id="two tensors sent"),
    ],
)
def test_operations_beside_those_of_the_plain_model(
    devices: list[str], further: dict[str, int]
) -> None:
    plain: Counter[str] = Counter()
    model, (x, y) = layers(), torch.randn(2, 2, WIDTH)
    F.mse_loss(model(x), y).backward()
    with Operations(plain):
        F.mse_loss(model(x), y).backward()
    # A backward starts with the weight of its microbatch.
    plain["aten.full_like.default"] = plain.pop("aten.ones_like.default")
    found = by_microbatch(devices, Operations)
    assert found - plain == further
    assert not plain - found

"""The cost of actions, without a clock: the calls of functions of Python's that each kind makes.

A step is run until everything about it is known. A row is for one feature: a feature costs nothing
where it is not in force. A number that falls may be lowered here; one that rises has to be found.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.plan import Action, Kind, Placement, Plan
from pykern.runtime.stage.stage import Stage
from tests.support.own_calls import is_own

WIDTH = 8
NUM_MICROBATCHES = 4

KINDS = {"B": Kind.B, "I": Kind.I, "W": Kind.W}


class Counted:
    """The calls that the actions of each kind and stage make, the most of any microbatch."""

    def __init__(self) -> None:
        self.most: Counter[tuple[Kind, int]] = Counter()

    def around(self, kind: Kind, stage: Stage, call: Callable[[int], None]) -> Any:
        """The function to call for an action instead."""

        def counted(microbatch: int) -> None:
            number = 0

            def notice(frame: FrameType, event: str, _: object) -> None:
                nonlocal number
                code = frame.f_code
                # Comprehensions have frames of their own in Pythons before 3.12.
                if (
                    event == "call"
                    and is_own(code)
                    and not code.co_name.endswith(("comp>", "genexpr>"))
                ):
                    number += 1

            sys.setprofile(notice)
            try:
                call(microbatch)
            finally:
                sys.setprofile(None)
            self.most[kind, stage.index] = max(self.most[kind, stage.index], number)

        return counted


class Skips(nn.Module):
    """A value of the first block is read by the last, and not by the one between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears()

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        y: Tensor = first(x)
        kept = torch.sin(y)
        return torch.add(last(middle(y)), kept)


class InPlaceSkips(Skips):
    """The same, with modules that work in place behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(layer, nn.ReLU(inplace=True)) for layer in linears())
        )


class Scaled(nn.Linear):
    """Has a constant buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(()))
        self.scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Named(nn.Module):
    """Gets a scale by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is not None
        return torch.mul(self.linear(x), scale)


def linears(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def dropouts() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(3))
    )


def in_place() -> nn.Sequential:
    layers = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


def in_place_behind() -> nn.Sequential:
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)) for _ in range(3))
    return nn.Sequential(*layers)


def pairs() -> nn.Sequential:
    return linears(6)


def constants(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Scaled() for _ in range(count)))


def pairs_of_constants() -> nn.Sequential:
    return constants(6)


def named() -> nn.Sequential:
    return nn.Sequential(*(Named() for _ in range(3)))


def plan_of(kinds: str) -> Plan:
    """Three stages on one worker, which takes each microbatch through all of them and back."""
    row = [
        Action(kind, stage, microbatch)
        for microbatch in range(NUM_MICROBATCHES)
        for stage, kind in [
            *((stage, Kind.F) for stage in range(3)),
            *((stage, KINDS[kind]) for stage in (2, 1, 0) for kind in kinds),
        ]
    ]
    return Plan(Placement(1, [0, 0, 0]), NUM_MICROBATCHES, [row])


def calls_of(model: nn.Module, kinds: str, options: dict[str, Any]) -> dict[str, list[int]]:
    """How many calls the actions of the fourth step make, by kind and stage."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH)
    named = (
        {"scale": torch.ones(2 * NUM_MICROBATCHES, 1)}
        if isinstance(model, nn.Sequential) and isinstance(model[0], Named)
        else {}
    )
    counted = Counted()
    options = {"devices": "cpu:1", "schedule": plan_of(kinds), "loss_fn": F.mse_loss, **options}
    with pykern.Pipeline(model, **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=y, **named)
        pipe._executor.watch(counted.around)
        pipe.step(x, target=y, **named)
    found: dict[str, list[int]] = {}
    for (kind, stage), number in counted.most.items():
        found.setdefault(kind.name, [0, 0, 0])[stage] = number
    return found


PLAIN = {"F": [3, 3, 6], "B": [2, 2, 2]}
# The first draw of a step, in the first stage, takes the seed of the step, and is intercepted.
DROPOUT = [22, 12, 15]


@pytest.mark.parametrize(
    ("make", "kinds", "options", "table"),
    [
        pytest.param(linears, "B", {}, PLAIN, id="plain"),
        pytest.param(
            linears, "IW", {}, {"F": [3, 3, 6], "I": [15, 36, 43], "W": [5, 13, 13]}, id="split"
        ),
        pytest.param(in_place, "B", {}, {"F": [3, 13, 16], "B": [2, 2, 2]}, id="in place"),
        pytest.param(in_place_behind, "B", {}, PLAIN, id="in place behind"),
        pytest.param(dropouts, "B", {}, {"F": DROPOUT, "B": [3, 3, 3]}, id="dropout"),
        pytest.param(
            pairs,
            "B",
            {"recompute": "stage"},
            {"F": [4, 4, 6], "B": [3, 3, 2], "R": [2, 2, 0]},
            id="recompute stage",
        ),
        pytest.param(
            pairs,
            "B",
            {"recompute": "layer"},
            {"F": [24, 24, 6], "B": [32, 32, 2], "R": [12, 12, 0]},
            id="recompute layer",
        ),
        pytest.param(
            Skips,
            "B",
            {"sample": torch.ones(2, WIDTH)},
            {"F": [1, 1, 5], "B": [3, 2, 4]},
            id="skips",
        ),
        pytest.param(
            InPlaceSkips,
            "B",
            {"sample": torch.ones(2, WIDTH)},
            {"F": [1, 1, 5], "B": [3, 2, 4]},
            id="skips in place",
        ),
        pytest.param(
            Skips,
            "B",
            {"sample": torch.ones(2, WIDTH), "recompute": "stage"},
            {"F": [8, 7, 13], "B": [4, 4, 4], "R": [6, 5, 0]},
            id="skips recompute stage",
        ),
        pytest.param(
            dropouts,
            "B",
            {"recompute": "stage"},
            {"F": [39, 14, 15], "B": [5, 4, 3], "R": [27, 9, 0]},
            id="dropout recompute stage",
        ),
        pytest.param(named, "B", {}, {"F": [6, 6, 9], "B": [2, 2, 2]}, id="keywords"),
        pytest.param(constants, "B", {}, {"F": [7, 7, 10], "B": [3, 3, 3]}, id="constant buffers"),
        pytest.param(
            pairs_of_constants,
            "B",
            {"recompute": "stage"},
            {"F": [13, 13, 10], "B": [4, 4, 3], "R": [2, 2, 0]},
            id="recompute stage with constant buffers",
        ),
        pytest.param(
            linears,
            "B",
            {"check_finite": "loss"},
            {"F": [3, 3, 10], "B": [2, 2, 2]},
            id="check_finite",
        ),
    ],
)
def test_actions_call_no_more_than_they_need(
    make: Callable[[], nn.Module], kinds: str, options: dict[str, Any], table: dict[str, list[int]]
) -> None:
    found = calls_of(make(), kinds, options)
    assert found.keys() == table.keys()
    for kind, numbers in found.items():
        for stage, number in enumerate(numbers):
            assert number <= table[kind][stage], (kind, stage, numbers)


def test_a_plain_action_is_a_few_calls() -> None:
    """The promise that no row may break, whatever the table says."""
    found = calls_of(linears(), "B", {})
    assert max(found["F"]) <= 8
    assert max(found["B"]) <= 5

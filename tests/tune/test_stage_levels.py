"""The bytes of stages of several units follow from those of units and of pairs."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.budget.fit_memory import most_held
from pykern.budget.level_costs import StageLevel
from pykern.budget.measure import with_starts
from pykern.models import gpt, next_token_loss
from pykern.pipeline.left_alone import left_alone
from pykern.plan import Costs, Kind
from pykern.schedules import by_name
from pykern.tuning.asked import Asked
from pykern.tuning.held import held
from pykern.tuning.stage_levels import StageLevels

from .synthetic import measurements

ROWS, WIDTH = 8, 8
# Enough for anything; without a limit, recompute levels are not measured.
MEMORY = 2**30
COSTS = Costs(1.0, 1.0, input_ns=1.0, weight_ns=1.0)


class Skipping(nn.Module):
    """A value that goes past the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.low, self.middle, self.high = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the same width."""
        kept = F.relu(self.into(x))
        low = F.relu(self.high(F.relu(self.middle(F.relu(self.low(kept))))))
        return self.out(torch.cat([kept, low], dim=1))


def asked_of(name: str) -> Asked:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    if name == "gpt":
        ids = torch.randint(256, (ROWS, 9))
        layers = gpt(layers=2, width=16, heads=4, context=8)
        return Asked(layers, ids[:, :-1], next_token_loss, "cpu:2", ids[:, 1:], memory=MEMORY)
    if name == "skips":
        return Asked(Skipping(), x, F.mse_loss, "cpu:2", x, memory=MEMORY)
    parts = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    layers = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))
    return Asked(layers, x, F.mse_loss, "cpu:2", x, memory=MEMORY)


@pytest.fixture(scope="module", params=["mlp", "gpt", "skips"])
def measured(request: pytest.FixtureRequest) -> tuple[Asked, StageLevels]:
    """A model, and the bytes of its units."""
    asked, sizes = asked_of(request.param), (1, 2)
    with left_alone([asked.model]):
        tables = held(asked, sizes)
    of_units = measurements([1.0] * len(asked.units.names), sizes=tables, rows=sizes)
    return asked, StageLevels(of_units)


def off(
    measured: tuple[Asked, StageLevels], schedule: str, ends: Sequence[int], level: str = "ops"
) -> list[float]:
    """By device, by which share of the stages' own bytes the composed ones are off."""
    asked, levels = measured
    plan = by_name[schedule](2, 4)
    ends = [*ends, len(asked.units.names)]
    spans = [range(start, stop) for start, stop in pairwise([0, *ends])]
    of = levels.of(spans, asked.rows // 4, COSTS, split=plan.has(Kind.I))
    chosen, recompute = StageLevel("ops"), {}
    if level != "ops":
        recompute["recompute"] = level
        chosen = StageLevel("ops", level, frozenset(range(4)))
    (args, kwargs), target = asked.batch(asked.rows)
    with asked.pipeline(plan, spans, **recompute) as pipe:
        composed = most_held(pipe.plan, with_starts(of, plan), [chosen] * len(spans))
        devices = pipe.memory(*args, target=target, **kwargs).devices
    pairs = zip(composed, [device.activations for device in devices], strict=True)
    return [num_bytes / own - 1 for num_bytes, own in pairs if own is not None]


@pytest.mark.parametrize(
    ("schedule", "ends"),
    [
        ("gpipe", [2]),
        ("one_f_one_b", [1]),
        ("one_f_one_b", [3]),
        ("interleaved", [1, 2, 3]),
    ],
)
def test_stages_hold_what_is_composed(
    measured: tuple[Asked, StageLevels], schedule: str, ends: list[int]
) -> None:
    found = off(measured, schedule, ends)
    assert len(found) == 2
    assert max(map(abs, found)) < 0.02


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_recomputed_stages_hold_nearly_that(
    measured: tuple[Asked, StageLevels], level: str
) -> None:
    """Little is held, so workspaces count more; and a value that skips stages counts too long."""
    found = off(measured, "one_f_one_b", [3], level)
    assert min(found) > -0.15
    assert max(found) < 0.3


@pytest.mark.parametrize("measured", ["gpt", "skips"], indirect=True)
def test_split_backwards_hold_nearly_that(measured: tuple[Asked, StageLevels]) -> None:
    """An I lets go of activations when it ends, of which units of their own tell too little."""
    assert max(map(abs, off(measured, "zb_h1", [2]))) < 0.2


def test_a_first_stage_lets_go_of_everything(measured: tuple[Asked, StageLevels]) -> None:
    asked, levels = measured
    num_units = len(asked.units.names)
    for span in [range(1), range(2), range(3)]:
        spans = [span, range(span.stop, num_units)]
        first, _ = levels.of(spans, 2, COSTS, split=True)
        for found in (first.kept["ops"].held, *(one.held for one in first.rebuilt.values())):
            assert found is not None
            assert sum(found.own.values()) + sum(found.others.values()) == 0

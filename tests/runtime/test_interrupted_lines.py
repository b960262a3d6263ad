"""An interrupt at any line of a step: the next step has the bits of a fresh pipeline's."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.diagonal import nightly
from tests.interrupts import at_every_line
from tests.runtime.plans import recomputed, split_backward, two_replicas
from tests.runtime.skip_models import UNet
from tests.runtime.tied_models import tied_ends

WIDTH = 6
# Rows of a batch of four microbatches, and of one whose last has none.
ROWS, FEW = 8, 3
PLAN = schedules.one_f_one_b(2, 4)


@dataclass
class Setting:
    """A pipeline, and how its steps are called."""

    model: Callable[[], nn.Module]
    schedule: Plan | str = PLAN
    options: dict[str, Any] = field(default_factory=dict)
    scaler: bool = False
    few: int = FEW
    state: dict[str, Any] = field(default_factory=dict)

    def open(self) -> pykern.Pipeline:
        torch.manual_seed(0)
        kind = pykern.AsyncPipeline if "optimizer" in self.options else pykern.Pipeline
        return kind(
            self.model(),
            devices=f"cpu:{getattr(self.schedule, 'num_devices', 2)}",
            schedule=self.schedule,
            loss_fn=F.mse_loss,
            **self.options,
        )


def mlp(*between: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(layers[0], *between, layers[1], nn.Tanh(), layers[2], layers[3])


def with_dropout() -> nn.Sequential:
    return mlp(nn.Dropout(0.3)).append(nn.Dropout(0.2))


SETTINGS = {
    "plain": Setting(mlp),
    "tied": Setting(tied_ends),
    "replicas": Setting(mlp, two_replicas(2, 4)),
    "recomputed": Setting(with_dropout, recomputed(PLAN)),
    "split": Setting(mlp, split_backward(PLAN, delay=2)),
    "skips": Setting(
        lambda: UNet(3),
        schedules.one_f_one_b(3, 4),
        {"sample": torch.zeros(2, WIDTH)},
    ),
    "random": Setting(with_dropout),
    "one device": Setting(with_dropout, recomputed(schedules.one_f_one_b(1, 4))),
    "finite": Setting(mlp, options={"check_finite": "activations"}),
    "scaler": Setting(mlp, scaler=True),
    "batch norm": Setting(
        lambda: mlp(nn.BatchNorm1d(WIDTH)), options={"deferred_batch_norm": True}, few=ROWS
    ),
    "asynchronous": Setting(
        mlp, "pipedream", {"microbatches": 4, "optimizer": lambda of: torch.optim.SGD(of, 0.1)}
    ),
}


def prepared(pipe: pykern.Pipeline, setting: Setting, rows: int) -> Callable[[], list[Tensor]]:
    """A step from the state that the pipeline begins with, which gives all that it makes."""
    pipe.flush()
    pipe.load_state_dict(setting.state)
    pipe.zero_grad()
    torch.manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if setting.scaler else None
    x, y = torch.randn(2, rows, WIDTH)

    def step() -> list[Tensor]:
        made = [pipe.step(x, target=y, scaler=scaler), pipe.flush()]
        return [one for one in made if one is not None]

    return step


def all_of(step: Callable[[], list[Tensor]], pipe: pykern.Pipeline) -> list[Tensor]:
    """The results of the step, with gradients, buffers, and the state of random numbers."""
    made = step()
    gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
    state = [value.clone() for value in pipe.state_dict().values()]
    return [*made, *gradients, *state, torch.get_rng_state()]


# A step for each of some hundred lines: two minutes on a machine that is shared by ten others.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "stride"),
    [*((name, 83) for name in SETTINGS), *(nightly(name, 1) for name in SETTINGS)],
)
def test_the_next_step_is_that_of_a_fresh_pipeline(name: str, stride: int) -> None:
    setting = SETTINGS[name]
    with setting.open() as fresh:
        setting.state = copy.deepcopy(fresh.state_dict())
        expected = all_of(prepared(fresh, setting, setting.few), fresh)
    with setting.open() as pipe:
        for rows in (setting.few, ROWS, ROWS):
            prepared(pipe, setting, rows)()

        def check(where: str) -> None:
            made = all_of(prepared(pipe, setting, setting.few), pipe)
            assert len(made) == len(expected), where
            assert all(map(torch.equal, made, expected)), where

        times = at_every_line(lambda: prepared(pipe, setting, ROWS), check, stride)
    assert times > 5

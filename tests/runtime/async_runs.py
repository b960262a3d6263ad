"""Pipelines without a flush, and the rules that they are compared with."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.plan import Plan
from tests.runtime import update_rules
from tests.runtime.update_rules import MakeOptimizer, Rules

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.NAdam(params, lr=0.01, foreach=True),
}
RULES = {"pipedream": update_rules.pipedream, "pipedream_2bw": update_rules.two_buffered}
Schedule = str | Callable[..., Plan]


def pipeline(
    layers: nn.Sequential, schedule: Schedule, microbatches: int, make: MakeOptimizer, **more: Any
) -> pykern.AsyncPipeline:
    arguments: dict[str, Any] = {"loss_fn": F.mse_loss, "balance": "layers", **more}
    return pykern.AsyncPipeline(
        layers,
        devices=f"cpu:{len(layers)}",
        schedule=schedule,
        microbatches=microbatches,
        optimizer=make,
        **arguments,
    )


def rules_for(layers: nn.Sequential, name: str, group: int, make: MakeOptimizer) -> Rules:
    plain = copy.deepcopy(layers)
    rules = Rules(list(plain), make(list(plain.parameters())), RULES[name], group, F.mse_loss)
    rules.start()
    return rules


def assert_same(pipe: pykern.AsyncPipeline, rules: Rules) -> None:
    plain = nn.Sequential(*rules.stages).state_dict()
    for key, value in pipe.state_dict().items():
        assert value.isfinite().all()
        assert torch.equal(value, plain[key]), key
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.optimizer is not None
    mine, theirs = pipe.optimizer.state_dict()["state"], rules.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for key, values in mine.items():
        for name, value in values.items():
            other = theirs[key][name]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


def layers_of(num_stages: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_stages)))


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def four(layers: nn.Sequential | None = None, **more: Any) -> pykern.AsyncPipeline:
    layers = layers_of() if layers is None else layers
    return pipeline(layers, "pipedream", 4, OPTIMIZERS["SGD"], **more)

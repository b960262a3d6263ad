"""`schedule="auto"` of a pipeline without a loss: a plan with all forwards first."""

from typing import Any

import pytest
import torch.nn.functional as F

import pykern
from pykern.plan.halves import forwards_first
from tests.outside.cases import MICROBATCHES, batch, mean_square, model, require_the_bits


def searched(layers: Any, **options: Any) -> pykern.Pipeline:
    return pykern.Pipeline(
        layers,
        devices="cpu:2",
        schedule="auto",
        microbatches=MICROBATCHES,
        balance="layers",
        budget_ms=2,
        **options,
    )


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_it_leads_to_the_bits_of_the_plain_model(recompute: str | None) -> None:
    layers = model()
    with searched(layers, recompute=recompute) as pipe:
        assert forwards_first(pipe.plan) == pipe.plan
        require_the_bits(pipe, layers)


@pytest.mark.parametrize(
    "options",
    [{"loss_fn": F.mse_loss}, {"memory": 1.0}, {"loss": "inside"}, {"replicas": 2}],
    ids=lambda options: next(iter(options)),
)
def test_what_says_otherwise_gets_a_plan_of_steps(options: dict[str, Any]) -> None:
    if "replicas" in options:
        options = {**options, "devices": "cpu:4"}
    devices = {"devices": "cpu:2", "microbatches": 8, **options}
    with pykern.Pipeline(
        model(), schedule="auto", balance="layers", budget_ms=2, **devices
    ) as pipe:
        assert forwards_first(pipe.plan) != pipe.plan


def test_a_loss_outside_is_asked_for_beside_a_loss() -> None:
    layers = model()
    with searched(layers, loss="outside", loss_fn=mean_square) as pipe:
        assert forwards_first(pipe.plan) == pipe.plan
        pipe.step(batch())

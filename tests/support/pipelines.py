"""Pipelines as many tests make them."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F

import pykern
from pykern.plan import Plan


def small(model: nn.Module | Sequence[nn.Module], **options: Any) -> pykern.Pipeline:
    """Two workers and two microbatches, unless `options` of Pipeline say otherwise."""
    usual: dict[str, Any] = {"devices": "cpu:2", "microbatches": 2, "loss_fn": F.mse_loss}
    return pykern.Pipeline(model, **(usual | options))


def planned(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan,
    loss_fn: Any = F.mse_loss,
    devices: Any = "cpu",
    **options: Any,
) -> pykern.Pipeline:
    """A pipeline of a plan, with as many layers in a stage as in another.

    Args:
        model: as for Pipeline, as are the options.
        plan: what it runs.
        loss_fn: of the last output.
        devices: "cpu" or "cuda" for as many of them as the plan has, or as for Pipeline.
        options: others.
    """
    named = {
        "cpu": f"cpu:{plan.num_devices}",
        "cuda": [f"cuda:{number}" for number in range(plan.num_devices)],
    }
    if isinstance(devices, str):
        devices = named.get(devices, devices)
    usual: dict[str, Any] = {"balance": "layers"}
    return pykern.Pipeline(
        model, devices=devices, schedule=plan, loss_fn=loss_fn, **(usual | options)
    )

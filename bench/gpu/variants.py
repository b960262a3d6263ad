"""The ways in which a pipeline runs a training step on GPUs, each measured where it can be."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import pykern
from pykern.partition import Balance
from pykern.plan import Plan

from .frame import Json

Capture = Literal[True, False, "step"]

CAPTURES: dict[str, Capture] = {"eager": False, "graph": True, "step": "step"}
# The GPU as four devices: streams that share all of it, and groups of its multiprocessors.
FOURS: dict[str, Any] = {"streams": ["cuda:0"] * 4, "groups": "cuda:0/4"}
# The first step runs eagerly, the second captures, the third replays.
WARM_UP = 3


def pipeline(
    model: nn.Sequential,
    plan: Plan,
    devices: Any,
    capture: Capture,
    loss_fn: Callable[..., Any],
    balance: Balance = "layers",
    **options: Any,
) -> pykern.Pipeline:
    """A pipeline with these and further arguments of `pykern.Pipeline`."""
    # The one before, which is held in cycles, has groups and memory that this one is to get.
    gc.collect()
    return pykern.Pipeline(
        model,
        devices=devices,
        schedule=plan,
        loss_fn=loss_fn,
        balance=balance,
        capture=capture,
        **options,
    )


def of_each(measure: Callable[[Capture], Json]) -> Json:
    """The figures of each variant; of one that fails, the error in their place."""
    return {name: tried(partial(measure, capture)) for name, capture in CAPTURES.items()}


def tried(measure: Callable[[], Json]) -> Json:
    """The figures, or the error in their place."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def finish() -> None:
    """Waits for the GPU; a host that plays one is never behind."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

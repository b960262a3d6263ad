"""Pipelines one after another, called and captured: whether the GPU's memory comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern.schedules import one_f_one_b

from .frame import Json
from .tools import DEVICE
from .variants import CAPTURES, FOURS, WARM_UP, Capture, finish, pipeline

NUM_PIPELINES = 20
# Afterwards libraries and streams have what they keep for good.
SETTLED = 3
WIDTH, ROWS = 256, 64
# The driver gives and takes back memory in parts of 2 MiB.
SLACK_BYTES = 2**22


def run(folder: Path) -> Json:
    found = {name: free_bytes(capture, pykern.Pipeline.close) for name, capture in CAPTURES.items()}
    if lost := {name: lost_bytes(free) for name, free in found.items() if is_lost(free)}:
        raise RuntimeError(f"memory does not come back: {lost}")
    return {name: {"free_bytes": free} for name, free in found.items()}


def control() -> bool:
    """Pipelines that are kept."""
    kept: list[pykern.Pipeline] = []
    found = is_lost(free_bytes(True, kept.append))
    for pipe in kept:
        pipe.close()
    return found


def free_bytes(capture: Capture, end: Callable[[pykern.Pipeline], object]) -> list[int]:
    """The GPU's free memory after each pipeline."""
    found = []
    for _ in range(NUM_PIPELINES):
        end(stepped(capture))
        gc.collect()
        finish()
        torch.cuda.empty_cache()
        found.append(torch.cuda.mem_get_info(DEVICE)[0])
    return found


def stepped(capture: Capture) -> pykern.Pipeline:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    x, y = torch.randn(2, ROWS, WIDTH).to(DEVICE)
    pipe = pipeline(model, one_f_one_b(4, 8), FOURS["streams"], capture, F.mse_loss)
    for _ in range(WARM_UP):
        pipe.step(x, target=y)
    return pipe


def lost_bytes(free: list[int]) -> int:
    return free[SETTLED - 1] - free[-1]


def is_lost(free: list[int]) -> bool:
    return lost_bytes(free) > SLACK_BYTES

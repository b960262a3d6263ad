"""Steps of each way to run them, for a tool to look at: python -m bench.gpu.each_once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pykern.schedules import one_f_one_b

from .tools import DEVICE
from .variants import CAPTURES, FOURS, WARM_UP, Capture, finish, pipeline

PLAN = one_f_one_b(4, 4)


def steps(device: torch.device, captures: Mapping[str, Capture]) -> None:
    """As many as it takes for graphs to be captured and replayed."""
    for devices_name, devices in FOURS.items():
        for name, capture in captures.items():
            try:
                run(device, devices, capture)
            except Exception as error:
                print(f"failed {devices_name}, {name}: {error}".replace("\n", " "), flush=True)
            else:
                print(f"ran {devices_name}, {name}", flush=True)


def run(device: torch.device, devices: Any, capture: Capture) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(PLAN.num_stages)))
    x, y = torch.randn(2, 8, 16).to(device)
    with pipeline(model, PLAN, devices, capture, F.mse_loss) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        finish()


if __name__ == "__main__":
    steps(DEVICE, CAPTURES)

"""Helpers that the tests of streams share."""

import time
from typing import Any

import torch
from torch import Tensor, nn

import pykern


class Sleeps(nn.Module):
    """Notes when it begins and ends with each microbatch."""

    def __init__(self, name: str, events: list[str], seconds: float = 0.002) -> None:
        super().__init__()
        self.name, self.events, self.seconds = name, events, seconds

    def forward(self, x: Tensor) -> Tensor:
        number = int(x[0, 0].item())
        self.events.append(f"{self.name} begins {number}")
        time.sleep(self.seconds)
        self.events.append(f"{self.name} ends {number}")
        return x


def numbered(count: int, rows: int = 1) -> list[Tensor]:
    """Batches that hold their number everywhere."""
    return [torch.full((rows, 2), float(number)) for number in range(count)]


def pipeline(layers: Any, num_devices: int = 2, microbatches: int = 1) -> pykern.Pipeline:
    """One that has run, so that it is known whether its layers draw."""
    pipe = pykern.Pipeline(layers, devices=f"cpu:{num_devices}", microbatches=microbatches)
    pipe(torch.full((microbatches, 2), -1.0))
    return pipe

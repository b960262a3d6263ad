"""Steps under torch's check that nothing makes the host wait for the GPU, called and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.schedules import one_f_one_b

from .frame import Json
from .tools import DEVICE
from .variants import CAPTURES, FOURS, WARM_UP, Capture, finish, pipeline, tried

NUM_STEPS = 3
WIDTH, ROWS = 64, 16


class Waits(nn.Linear):
    """A layer that looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() < 1e9 else x


def run(folder: Path) -> Json:
    found = {
        name: {of: tried(partial(steps, nn.Linear, way, capture)) for of, capture in ways.items()}
        for name, (way, ways) in {
            "streams": (FOURS["streams"], CAPTURES),
            "groups": (FOURS["groups"], CAPTURES),
        }.items()
    }
    if errors := [of for ways in found.values() for of in ways.values() if "error" in of]:
        raise RuntimeError(f"a step waits for the GPU: {errors}")
    return found


def control() -> bool:
    """A layer that looks at a value."""
    return "synchronizing" in tried(lambda: steps(Waits, FOURS["streams"], False)).get("error", "")


def steps(layer: Callable[..., nn.Module], devices: Any, capture: Capture) -> Json:
    model = nn.Sequential(*(layer(WIDTH, WIDTH) for _ in range(4)))
    x, y = torch.randn(2, ROWS, WIDTH).to(DEVICE)
    with pipeline(model, one_f_one_b(4, 8), devices, capture, F.mse_loss) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        finish()
        with refused():
            for _ in range(NUM_STEPS):
                pipe.step(x, target=y)
        finish()
    return {"steps": NUM_STEPS}


@contextmanager
def refused() -> Iterator[None]:
    """Within it, torch raises where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""Captures where seven tenths of the GPU's memory are taken, and torch's cache has the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.runtime.gpu.cuda import Gpus
from pykern.schedules import one_f_one_b

from .frame import Json
from .tools import DEVICE
from .variants import FOURS, finish, pipeline

TAKEN = 0.7
# Left to the driver, and to the first step.
LEFT_BYTES = 2**30
WIDTH, ROWS = 1024, 512


def run(folder: Path) -> Json:
    return steps(lambda: None)


def control() -> bool:
    """A cache that is not given back."""
    give_back = Gpus.give_back_cache
    try:
        steps(lambda: setattr(Gpus, "give_back_cache", lambda _: None))
    except RuntimeError as error:
        return "memory" in str(error)
    finally:
        setattr(Gpus, "give_back_cache", give_back)  # noqa: B010 - as mypy wants it
    return False


def steps(before_capture: Callable[[], None]) -> Json:
    """A called step, a cache of all that is left, the step that captures, and a replay."""
    free, total = torch.cuda.mem_get_info(DEVICE)
    ballast = taken(int(min(TAKEN * total, free - 2 * LEFT_BYTES)))
    model = nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    x, y = torch.randn(2, 8 * ROWS, WIDTH).to(DEVICE)
    with pipeline(model, one_f_one_b(4, 8), FOURS["streams"], True, F.mse_loss) as pipe:
        pipe.step(x, target=y)
        finish()
        cached = torch.cuda.mem_get_info(DEVICE)[0] - LEFT_BYTES // 64
        # Torch keeps it in its cache.
        taken(cached)
        before_capture()
        losses = [pipe.step(x, target=y).item() for _ in range(2)]
        finish()
        return {
            "taken_bytes": ballast.numel(),
            "cached_bytes": cached,
            "free_bytes": torch.cuda.mem_get_info(DEVICE)[0],
            "losses": losses,
        }


def taken(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)

"""The lines at which the host waits for a GPU, as torch's debug mode for synchronisation tells."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from .. import _C

# The text by which torch warns of a call that waits.
_WARNING = "called a synchronizing CUDA operation"
_PYKERN = f"{Path(__file__).parents[1]}/"


def host_waits_of(step: Callable[[], None]) -> list[str]:
    """Runs a step, and returns the lines of layers and losses that wait, each once."""
    with (
        warnings.catch_warnings(record=True) as seen,
        _C.Undo(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode()),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
    found = (one for one in seen if _WARNING in str(one.message))
    lines = (
        f"{Path(one.filename).name}:{one.lineno}"
        for one in found
        if not one.filename.startswith(_PYKERN)
    )
    return list(dict.fromkeys(lines))

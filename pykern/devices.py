"""Names of devices: what a user writes, and the lanes that it stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

Devices = str | Sequence[str | torch.device]

_WORKERS = re.compile(r"cpu(?::([0-9]{1,4}))?")
MAX_WORKERS = 256


def parse_devices(devices: Devices) -> list[torch.device]:
    """One device per lane: "cpu:4" is four CPU workers, "cpu" one, a list names each.

    Raises:
        TypeError: it is neither a string nor a list.
        ValueError: the name is unknown, the count out of range, or the list empty.
    """
    if isinstance(devices, str):
        match = _WORKERS.fullmatch(devices)
        if match is None:
            raise _unknown(devices)
        count = int(match[1] or 1)
        if not 1 <= count <= MAX_WORKERS:
            raise ValueError(f"devices={devices!r}: the number of workers is 1 to {MAX_WORKERS}")
        return [torch.device("cpu")] * count
    if not isinstance(devices, Sequence):
        raise TypeError(f"devices is a string like 'cpu:4' or a list of devices, got {devices!r}")
    names = [str(device) for device in devices]
    if not names:
        raise ValueError("devices is empty: give at least one, for example 'cpu:4'")
    for name in names:
        if name != "cpu":
            raise _unknown(name)
    return [torch.device("cpu")] * len(names)


def _unknown(name: str) -> ValueError:
    if name.startswith("cuda"):
        return ValueError(
            f"device {name!r}: CUDA devices are not supported yet; use CPU workers, e.g. 'cpu:4'"
        )
    return ValueError(
        f"device {name!r} is unknown: use 'cpu:N' for N CPU workers, or a list of 'cpu'"
    )

"""Names of devices, as a user writes them, and the lanes that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf

import torch

from .device_names import GPU, WORKERS, gpu_and_parts, num_bytes_of, num_workers, unknown


@dataclass(frozen=True)
class Device:
    """A device with its relative speed and its memory, by which stages are cut.

    Attributes:
        name: "cpu" for a CPU worker, or a GPU, "cuda:1".
        speed: how much work it does per unit of time, in any unit that all devices share.
            Devices that are given by name alone have speed 1. All devices take equal time.
        memory: the bytes that its stages may hold, or such as "24GiB" or "24GB"; None for any
            number. It goes with balance "time" or "memory".

    Raises:
        TypeError, ValueError: `name` is not a string or a torch.device, `speed` is not a number
            above 0, or `memory` is no number of bytes above 0.
    """

    name: str | torch.device
    _: KW_ONLY
    speed: float = 1.0
    memory: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str | torch.device):
            raise TypeError(
                f"name must be a string such as 'cuda:1', or a torch.device, got {self.name!r}. "
                "Give one device"
            )
        if isinstance(self.speed, bool) or not isinstance(self.speed, int | float):
            raise TypeError(
                f"speed must be a number above 0, got {self.speed!r}. Omit speed for 1, that of "
                "other devices"
            )
        if not 0 < self.speed < inf:
            raise ValueError(
                f"speed must be a number above 0, got {self.speed}. A device that does 60 % of "
                "another's work has speed=0.6"
            )
        _ = self.num_bytes

    @property
    def num_bytes(self) -> float | None:
        """The memory in bytes; None for any number."""
        return None if self.memory is None else num_bytes_of(self.memory)


Devices = str | Sequence[str | torch.device | Device]


@dataclass(frozen=True)
class DeviceLane:
    """A lane: a GPU, a group of SMs of a GPU, or a CPU worker, which runs one row of a plan.

    Attributes:
        device: where its tensors live: the CPU, or a GPU with its index.
        part: the index of its group of SMs, from 0.
        num_parts: the number of groups of SMs that the GPU is split into; 1 for a whole GPU.
        speed: as of `Device`.
        memory: the bytes that its stages may hold; None for any number.
    """

    device: torch.device
    part: int = 0
    num_parts: int = 1
    speed: float = 1.0
    memory: float | None = None


def parse_devices(devices: Devices) -> list[DeviceLane]:
    """The lanes that a user's `devices` argument stands for.

    "cpu:4" is four CPU workers, "cpu" one, "cuda" every GPU, "cuda:1" one GPU, "cuda:0/4" four
    groups of the SMs of one GPU. A list has the name of each lane's device, or a `Device`. Lanes
    that name the same GPU share the whole GPU.

    Raises:
        TypeError: `devices` is neither a string nor a list.
        ValueError: a name is unknown, a count is out of range, the list is empty or mixes CPU
            workers and GPUs, or a GPU does not exist.
    """
    if isinstance(devices, str):
        return _lanes(devices)
    if not isinstance(devices, Sequence):
        raise TypeError(
            f"devices must be a string or a list of devices, got {devices!r}. Write for example "
            "'cpu:4' for four workers, or 'cuda' for all GPUs"
        )
    given = [each if isinstance(each, Device) else Device(str(each)) for each in devices]
    names = [str(device.name) for device in given]
    if not names:
        raise ValueError("devices must hold at least one, got an empty list. For example 'cpu:4'")
    lanes = [
        DeviceLane(_device(str(each.name)), speed=each.speed, memory=each.num_bytes)
        for each in given
    ]
    if len({lane.device.type for lane in lanes}) > 1:
        raise ValueError(f"devices must be CPU workers or GPUs, not both, got {names!r}")
    return lanes


def _lanes(name: str) -> list[DeviceLane]:
    """The lanes that a string on its own stands for."""
    if (count := num_workers(name)) is not None:
        return [DeviceLane(torch.device("cpu"))] * count
    if name == "cuda":
        return [DeviceLane(torch.device("cuda", index)) for index in range(_num_gpus(name))]
    if (gpu := gpu_and_parts(name)) is None:
        raise unknown(name)
    index, num_parts = gpu
    device = _gpu(name, index)
    return [DeviceLane(device, part, num_parts) for part in range(num_parts)]


def _device(name: str) -> torch.device:
    """The device that one entry of a list names."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda":
        raise ValueError("device must say which GPU in a list, got 'cuda'. Use 'cuda:0'")
    if WORKERS.fullmatch(name):
        raise ValueError(
            f"device {name!r} in a list must be 'cpu', since CPU workers have no numbers. Use "
            "devices='cpu:2' for two"
        )
    if (gpu := GPU.fullmatch(name)) is None:
        raise unknown(name)
    if gpu[2] is not None:
        raise ValueError(
            f"device must be a whole GPU in a list, got {name!r}. Only a GPU on its own is split "
            f"into parts: devices={name!r}"
        )
    return _gpu(name, int(gpu[1]))


def _gpu(name: str, index: int) -> torch.device:
    count = _num_gpus(name)
    if index >= count:
        raise ValueError(
            f"device must be one of {count} GPUs that torch sees, from 0, got {name!r}"
        )
    return torch.device("cuda", index)


def _num_gpus(name: str) -> int:
    # torch.backends.cuda.is_built() would be true for AMD's GPUs as well.
    if torch.version.cuda is None:
        raise ValueError(
            f"devices must be CPU workers, since torch is built without CUDA, got {name!r}. Use "
            "for example 'cpu:4'"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(
            f"devices must be CPU workers, since torch sees no GPU, got {name!r}. Use for example "
            "'cpu:4'"
        )
    return count

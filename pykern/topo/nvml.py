"""Facts of NVIDIA's management library about GPUs: ways between them, clocks, errors of memory.

It needs nvidia-ml-py (the extra `cuda`) and a driver; without either there are no facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# As in `nvidia-smi topo -m`, by the level of the common ancestor.
_ANCESTORS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_SLOWED = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat (hardware)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """One GPU at the moment of asking. A fact that the GPU does not tell is None.

    Attributes:
        clock_mhz: The clock of its multiprocessors.
        max_clock_mhz: The highest that it may have.
        slowed_by: The reasons for a clock below the highest.
        uncorrected_errors: Errors of its memory since the driver was loaded.
        pcie: Generation and width of its link to the host, such as 5 x16.
    """

    clock_mhz: int | None
    max_clock_mhz: int | None
    slowed_by: tuple[str, ...]
    uncorrected_errors: int | None
    pcie: str | None


@dataclass(frozen=True)
class Managed:
    """All GPUs; empty where the library or the driver is missing.

    Attributes:
        states: One for each GPU.
        ways: For each pair with the lower number first, in the terms of `nvidia-smi topo -m`: NV18
            for 18 NVLinks, PIX, PXB, PHB, NODE or SYS for PCIe.
    """

    states: Sequence[GpuState] = ()
    ways: Mapping[tuple[int, int], str] = field(default_factory=dict)


def managed(uuids: Sequence[str]) -> Managed:
    """The facts about these GPUs.

    Args:
        uuids: such as GPU-9c2f…, in the order of the GPUs' numbers.
    """
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return Managed()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Managed()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        pairs = [(a, b) for b in range(len(handles)) for a in range(b)]
        ways = {(a, b): _way(pynvml, handles[a], handles[b]) for a, b in sorted(pairs)}
        return Managed([_state(pynvml, handle) for handle in handles], ways)
    except pynvml.NVMLError:
        return Managed()
    finally:
        pynvml.nvmlShutdown()


def _state(nvml: Any, gpu: Any) -> GpuState:
    def told(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(gpu, *arguments)
        except nvml.NVMLError:
            return None

    reasons = told(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    generation = told(nvml.nvmlDeviceGetCurrPcieLinkGeneration)
    width = told(nvml.nvmlDeviceGetCurrPcieLinkWidth)
    return GpuState(
        told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        tuple(text for name, text in _SLOWED.items() if reasons & getattr(nvml, name)),
        told(
            nvml.nvmlDeviceGetTotalEccErrors,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        None if generation is None or width is None else f"{generation} x{width}",
    )


def _way(nvml: Any, one: Any, other: Any) -> str:
    """The way between two GPUs."""
    ends = [_nvlinks(nvml, gpu) for gpu in (one, other)]
    direct = ends[0].count(_place(nvml.nvmlDeviceGetPciInfo(other)))
    by_switch = min(links.count(None) for links in ends)
    if direct + by_switch > 0:
        return f"NV{direct + by_switch}"
    return _ANCESTORS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), "same board")


def _nvlinks(nvml: Any, gpu: Any) -> list[tuple[int, int, int] | None]:
    """Where each active NVLink of a GPU leads: a place on the bus, or None for a switch."""
    found: list[tuple[int, int, int] | None] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A GPU without such a link says so by an error.
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)
                there = _place(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link))
                found.append(None if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH else there)
    return found


def _place(pci: Any) -> tuple[int, int, int]:
    return pci.domain, pci.bus, pci.device

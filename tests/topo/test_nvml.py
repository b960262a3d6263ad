"""Facts from a stand-in for NVIDIA's management library, since tests run without a driver."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pykern.topo.nvml import GpuState, Managed, managed


class Nvml(SimpleNamespace):
    """Three GPUs: two with two NVLinks between them and one link more to a switch; one on PCIe."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 4, 2
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    nvmlDeviceGetHandleByUUID = staticmethod(["GPU-a", "GPU-b", "GPU-c"].index)
    is_open = 0

    def nvmlInit(self) -> None:
        self.is_open += 1

    def nvmlShutdown(self) -> None:
        self.is_open -= 1

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(domain=0, bus=16 + gpu, device=0)

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        if gpu == 2:
            raise self.NVMLError
        return int(link < 3)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return 2 if link == 2 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return SimpleNamespace(domain=0, bus=99 if link == 2 else 16 + 1 - gpu, device=0)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return {1: 20, 0: 50}[one]

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return 0x24 if gpu == 0 else 1

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, since: int) -> int:
        if gpu > 0:
            raise self.NVMLError
        return 3

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: int) -> int:
        return 16


def test_ways_are_in_the_terms_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = managed(["GPU-a", "GPU-b", "GPU-c"])
    assert found.ways == {(0, 1): "NV3", (0, 2): "SYS", (1, 2): "PXB"}
    assert found.states[0] == GpuState(1200, 1980, ("power cap", "heat"), 3, "5 x16")
    assert found.states[1] == GpuState(1200, 1980, (), None, "5 x16")
    assert nvml.is_open == 0


def test_pcie_where_there_is_no_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(NVML_NVLINK_MAX_LINKS=0)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = managed(["GPU-a", "GPU-b", "GPU-c"])
    assert found.ways == {(0, 1): "SYS", (0, 2): "SYS", (1, 2): "PXB"}


def test_a_machine_without_a_driver_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()

    def fail() -> None:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert managed(["GPU-a"]) == Managed()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert managed(["GPU-a"]) == Managed()

"""Names of devices become lanes, or are refused before anything starts."""

from typing import Any

import pytest
import torch

from pykern.runtime.devices import DeviceLane, parse_devices

CPU = torch.device("cpu")
CUDA = [torch.device("cuda", index) for index in range(2)]


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("devices", "lanes"),
    [
        ("cpu", [DeviceLane(CPU)]),
        ("cpu:3", [DeviceLane(CPU)] * 3),
        (["cpu", CPU], [DeviceLane(CPU)] * 2),
        ("cuda", [DeviceLane(CUDA[0]), DeviceLane(CUDA[1])]),
        ("cuda:1", [DeviceLane(CUDA[1])]),
        ("cuda:1/1", [DeviceLane(CUDA[1])]),
        ("cuda:0/3", [DeviceLane(CUDA[0], part, 3) for part in range(3)]),
        (["cuda:1", CUDA[0]], [DeviceLane(CUDA[1]), DeviceLane(CUDA[0])]),
        (("cuda:0",) * 4, [DeviceLane(CUDA[0])] * 4),
    ],
)
def test_what_names_stand_for(devices: Any, lanes: list[DeviceLane]) -> None:
    assert parse_devices(devices) == lanes


@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cuda:2", "device must be one of 2 GPUs that torch sees, from 0, got 'cuda:2'"),
        ("cuda:2/2", "device must be one of 2 GPUs that torch sees, from 0, got 'cuda:2/2'"),
        (
            ["cuda:0", "cuda:7"],
            "device must be one of 2 GPUs that torch sees, from 0, got 'cuda:7'",
        ),
        ("cuda:0/0", "devices must have 1 to 64 parts, got 'cuda:0/0'"),
        ("cuda:0/65", "devices must have 1 to 64 parts, got 'cuda:0/65'"),
        ("cuda/2", "'cuda/2' is unknown"),
        ("cuda:0/", "'cuda:0/' is unknown"),
        ("cuda:-1", "'cuda:-1' is unknown"),
        ("cuda:٣", "is unknown"),
        ("cuda:0\n", "is unknown"),
        (["cuda:0/2"], "device must be a whole GPU in a list, got 'cuda:0/2'"),
        (["cuda"], "device must say which GPU in a list, got 'cuda'"),
        ([torch.device("cuda")], "device must say which GPU in a list, got 'cuda'"),
        (["cpu", "cuda:0"], "CPU workers or GPUs, not both"),
        (["cpu:2"], "device 'cpu:2' in a list must be 'cpu'"),
        (["meta"], "'meta' is unknown"),
    ],
)
def test_what_is_no_device_is_refused(devices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_devices(devices)


@pytest.mark.parametrize("devices", ["cuda", "cuda:0", "cuda:0/4", ["cuda:0"], ["cpu", "cuda:0"]])
def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r"torch is built without CUDA, got 'cuda.*'. Use"):
        parse_devices(devices)


@pytest.mark.parametrize("devices", ["cuda", "cuda:0", ["cuda:0"]])
def test_a_machine_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch, devices: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"torch sees no GPU, got 'cuda.*'"):
        parse_devices(devices)

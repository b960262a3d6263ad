"""The CPU computes for GPUs that are not there, and knows which tensors would be on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.rehearse.host_waits import HostWaits
from pykern.rehearse.on_cpu import OnCpu


def calls_that_wait(run: Callable[[], Any]) -> list[str]:
    waits = HostWaits()
    with OnCpu(waits):
        run()
    assert all(one.line.file == "test_on_cpu.py" for one in waits.found)
    return [one.call for one in waits.found]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to("cuda:1"),
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).to(device=torch.device("cuda"), dtype=torch.float64),
        lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros(2, device="cuda") + 1,
        lambda: torch.ones(2, device=torch.zeros(1).cuda().device),
        lambda: nn.Linear(2, 1).cuda().weight,
        lambda: nn.Linear(2, 1).to("cuda")(torch.ones(2).cuda()),
    ],
)
def test_values_of_a_gpu_are_waited_for(make: Callable[[], Tensor]) -> None:
    assert calls_that_wait(lambda: make().sum().item()) == ["item"]
    assert calls_that_wait(lambda: make().cpu()) == ["cpu"]
    assert calls_that_wait(lambda: make().cpu().sum().item()) == ["cpu"]
    assert calls_that_wait(lambda: make().to("cpu", non_blocking=True)) == []


@pytest.mark.parametrize("where", ["cuda", torch.device("cuda:1"), None, lambda kept, _: kept])
def test_a_checkpoint_is_loaded_for_gpus(tmp_path: Path, where: Any) -> None:
    """A script that went on from its checkpoint failed: torch was not compiled with CUDA."""
    mode = OnCpu(HostWaits())
    with mode.in_force():
        torch.save({"weight": torch.ones(2, device="cuda")}, tmp_path / "last.pt")
        weight = torch.load(tmp_path / "last.pt", map_location=where)["weight"]
        is_of_gpu = weight.device != torch.device("cpu")
    assert is_of_gpu == (where is not None and not callable(where))
    assert torch.equal(weight, torch.ones(2))


def test_the_default_device_may_be_a_gpu() -> None:
    waits = HostWaits()
    with OnCpu(waits).in_force():
        torch.set_default_device("cuda")
        nn.Linear(2, 1)(torch.ones(2)).item()
        torch.set_default_device(None)
        nn.Linear(2, 1)(torch.ones(2)).item()
    assert list(waits.found.values()) == [1]


def test_values_of_the_host_are_not() -> None:
    def run() -> None:
        x = torch.ones(2)
        assert x.sum().item() == 2.0
        assert x.to(torch.float64).cpu().tolist() == [1.0, 1.0]
        assert repr(nn.Linear(2, 2).cuda().cpu().weight[0] > 9) == "tensor([False, False])"

    assert calls_that_wait(run) == ["cpu"]


def test_masks_of_a_gpu_are_waited_for() -> None:
    def run() -> None:
        x = torch.arange(4).cuda()
        assert x[x > 1].numel() == 2
        assert x[1:].numel() == 3
        assert torch.where(x > 1, x, x + 1).numel() == 4
        assert torch.where(x > 1)[0].numel() == 2

    assert calls_that_wait(run) == ["getitem", "where"]


def test_a_tensor_that_moves_is_a_copy() -> None:
    with OnCpu(HostWaits()):
        x = torch.ones(2)
        there = x.cuda()
        there.add_(1)
        assert torch.equal(x, torch.ones(2))
        assert there.cuda() is there
        assert there.device != x.device

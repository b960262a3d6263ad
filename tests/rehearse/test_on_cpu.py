"""The CPU computes for GPUs that are not there, and knows which tensors would be on them."""

from collections.abc import Callable
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

    assert calls_that_wait(run) == ["getitem"]


def test_a_tensor_that_moves_is_a_copy() -> None:
    with OnCpu(HostWaits()):
        x = torch.ones(2)
        there = x.cuda()
        there.add_(1)
        assert torch.equal(x, torch.ones(2))
        assert there.cuda() is there
        assert there.device != x.device

"""The CPU computes for GPUs that are not there, and knows which tensors would be on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.boxes import load
from pykern.rehearse.host_waits import HostWaits
from pykern.rehearse.names import gpus_of
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
        lambda: nn.Linear(2, 1).to(torch.ones(1).cuda()).weight,
        lambda: nn.Linear(2, 1).to(tensor=torch.ones(1).cuda()).weight,
        lambda: torch.ones(2, device=torch.ones(1).cuda().get_device()),
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 1).to(0),
        lambda: nn.Linear(2, 1).to(0, torch.float64),
        lambda: nn.Linear(2, 1).to(device="cuda"),
        lambda: nn.Linear(2, 1, device="cuda:1"),
        lambda: nn.Linear(2, 1, device="meta").to_empty(device="cuda"),
    ],
)
def test_a_module_is_moved_to_a_gpu_and_back(make: Callable[[], nn.Linear]) -> None:
    """`to(0)` was an error of a torch without CUDA, and `to("cpu")` left a module on the GPU."""
    waits = HostWaits()
    with OnCpu(waits).in_force():
        model, there = make(), torch.ones(1, device="cuda").device
        assert {each.device for each in model.parameters()} == {there}
        model.bias.sum().item()
        model.to("cpu")
        assert {each.device for each in model.parameters()} == {torch.device("cpu")}
        model.bias.sum().item()
    assert [one.call for one in waits.found.elements()] == ["item", "to", "to"]
    assert nn.Parameter(torch.ones(1)).device == torch.device("cpu")


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(2).cuda(2),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.ones(2, device=torch.device("cuda", 2)),
        lambda: nn.Linear(2, 1).to(2),
        lambda: torch.cuda.set_device("cuda:2"),
        lambda: torch.accelerator.set_device_index(2),
        lambda: torch.cuda.get_device_name(2),
    ],
)
def test_a_gpu_that_the_box_does_not_have_is_refused(use: Callable[[], object]) -> None:
    """A script for four GPUs passed its rehearsal on a box with two."""
    waits = HostWaits()
    with gpus_of(load("2x4090"), waits), OnCpu(waits, 2):
        torch.cuda.set_device(1)
        torch.cuda.set_device(-1)
        assert torch.ones(2).to("cuda:1").cuda(0).shape == (2,)
        with pytest.raises(RuntimeError, match="device must be one of the box's GPUs, 0 to 1, got"):
            use()

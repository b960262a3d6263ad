"""torch.cuda has the GPUs of a box, whether this torch has CUDA or not."""

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pykern.boxes import load
from pykern.rehearse.host_waits import HostWaits
from pykern.rehearse.names import gpus_of


def test_adam_of_a_torch_with_cuda_does_not_ask_for_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask_the_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "current_stream", ask_the_driver)
    # By which torch 2.11 asks.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask_the_driver)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with gpus_of(load("4x4090"), HostWaits()):
        torch.optim.Adam([weight], lr=0.5).step()
    assert torch.allclose(weight, torch.full((2,), 0.5))


@pytest.mark.filterwarnings("ignore:.*has been renamed|.*now calls:FutureWarning")
def test_a_script_may_ask_for_all_that_torch_tells_of_a_gpu() -> None:
    """All functions without arguments answer, but those of handles that only a driver has."""
    of_a_driver = {"cudart", "current_blas_handle", "current_solver_handle", "graph_pool_handle"}
    of_a_driver |= {"get_allocator_backend"}
    failed = {}
    with gpus_of(load("4x4090"), HostWaits()):
        for module in (torch.cuda, torch.accelerator):
            for name, ask in inspect.getmembers(module, inspect.isfunction):
                if name in of_a_driver or name.startswith("_") or _asks_for_more(ask):
                    continue
                try:
                    ask()
                except Exception as error:
                    failed[f"{module.__name__}.{name}"] = error
    assert failed == {}


def _asks_for_more(function: Callable[..., object]) -> bool:
    return any(
        each.default is each.empty
        and each.kind is not each.VAR_KEYWORD
        and each.kind is not each.VAR_POSITIONAL
        for each in inspect.signature(function).parameters.values()
    )


def test_a_script_is_told_what_its_box_has() -> None:
    with gpus_of(load("4x4090"), HostWaits()):
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_properties("cuda:1").major == 8
        assert torch.cuda.get_device_properties("cuda:1").multi_processor_count == 128
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        assert torch.accelerator.device_count() == 4
        with torch.cuda.nvtx.range("forward"), torch.accelerator.device_index(1):
            torch.cuda.nvtx.mark("here")


def test_a_box_that_does_not_tell_its_capability() -> None:
    box = load("2x3090")
    unknown = replace(box, devices=(replace(box.devices[0], capability=None),) * 2)
    with gpus_of(unknown, HostWaits()), pytest.raises(ValueError, match="box must tell the capab"):
        torch.cuda.get_device_capability()


def test_a_script_that_waits_for_an_accelerator_waits_for_gpus() -> None:
    waits = HostWaits()
    with gpus_of(load("4x4090"), waits):
        torch.ones(1).record_stream(torch.cuda.current_stream())
        torch.accelerator.synchronize()
    assert [wait.call for wait in waits.found] == ["synchronize"]


def test_a_compiled_module_runs() -> None:
    """It was an error within dynamo, which asks for the capability of the first GPU."""
    with gpus_of(load("4x4090"), HostWaits()):
        compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
        assert compiled(torch.ones(1, 2)).shape == (1, 1)

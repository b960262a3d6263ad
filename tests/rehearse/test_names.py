"""torch.cuda has the GPUs of a box, whether this torch has CUDA or not."""

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
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with gpus_of(load("4x4090"), HostWaits()):
        torch.optim.Adam([weight], lr=0.5).step()
    assert torch.allclose(weight, torch.full((2,), 0.5))

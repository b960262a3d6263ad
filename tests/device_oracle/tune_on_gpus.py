"""`pykern.tune` for GPUs, with torch's own engine. Run by test_device_oracle.py."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern
from pykern.boxes import Box, BoxDevice, BoxHost, BoxLink
from pykern.tuning import measure, overheads, trial
from tests.device_oracle.oracle import gpus
from tests.fake_cuda.fake import FakeCuda

WIDTH = 8
TWO = ["cuda:0", "cuda:1"]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(overheads, "_ROUNDS", 2)
    monkeypatch.setattr(trial, "FEWEST", 2)
    monkeypatch.setattr(trial, "MOST", 2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with gpus(2) as fake:
        yield fake


def model() -> nn.Sequential:
    norm = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten())
    linears = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return nn.Sequential(*linears, norm, nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


def tuned(layers: nn.Module, **more: Any) -> pykern.Choice:
    x = torch.ones(8, WIDTH)
    given: dict[str, Any] = {"sample": x, "target": x, "devices": TWO, "loss_fn": mse_loss}
    return pykern.tune(layers, **(given | more))


def test_the_model_is_afterwards_as_before(two_gpus: FakeCuda) -> None:
    layers = model()
    layers[0].get_parameter("weight").grad = torch.ones(WIDTH, WIDTH)
    before, x = copy.deepcopy(layers), torch.randn(8, WIDTH)
    numbers = torch.get_rng_state()
    choice = tuned(layers, sample=x, target=x)
    assert choice.best.measured_ns is not None
    assert torch.equal(torch.get_rng_state(), numbers)
    for name, value in before.state_dict().items():
        assert not layers.state_dict()[name].is_cuda
        assert torch.equal(layers.state_dict()[name], value), name
    weight, *others = layers.parameters()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(WIDTH, WIDTH))
    assert all(other.grad is None for other in others)


def test_the_choice_is_a_pipeline_on_the_same_gpus(two_gpus: FakeCuda, tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain, x = copy.deepcopy(layers), torch.randn(8, WIDTH)
    choice = tuned(layers)
    choice.save(tmp_path / "plan.json")
    with pykern.Pipeline(layers, tuned=tmp_path / "plan.json", loss_fn=mse_loss) as pipe:
        loss = pipe.step(x, target=x)
        assert {p.device for p in pipe.parameters()} <= {torch.device(name) for name in TWO}
    torch.testing.assert_close(loss.cpu(), mse_loss(plain(x), x).detach())


class Looking(nn.Linear):
    """A layer that looks at its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.detach().isfinite().all() else x.nan_to_num())


def test_bytes_of_a_model_that_looks_at_values_are_known(two_gpus: FakeCuda) -> None:
    choice = tuned(nn.Sequential(*(Looking(WIDTH, WIDTH) for _ in range(2))))
    assert all(min(one.peak_bytes) > 0 for one in choice.proposals)


def test_the_memory_of_the_gpus_is_kept(two_gpus: FakeCuda) -> None:
    """The GPUs of the oracle have a GiB each."""
    choice = tuned(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    assert choice.asked.memory_of_each == pytest.approx(0.9 * 2**30)
    assert all(max(one.peak_bytes) > 0 for one in choice.proposals)
    with pytest.raises(ValueError, match="memory must be enough for some plan, got 16"):
        tuned(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), memory=16)


def test_one_gpu_stands_for_those_of_a_box(two_gpus: FakeCuda) -> None:
    gpu = BoxDevice("NVIDIA X", 2**28, 1_000.0, None, (9, 0), 132)
    link = BoxLink((tuple(range(4)),), 20.0, 5_000.0)
    box = Box(3, "4 X", "measured", (), (gpu,) * 4, (link,), BoxHost(None, None))
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    choice = tuned(layers, devices="cuda:0", box=box)
    assert choice.asked.site.names == [f"cuda:{number}" for number in range(4)]
    assert choice.asked.site.memory == pytest.approx(0.9 * 2**28)
    assert all(one.measured_ns is None for one in choice.proposals)
    assert {p.device.type for p in layers.parameters()} == {"cpu"}
    with pytest.raises(ValueError, match="device must be one of 2 GPUs that torch sees"):
        choice.pipeline()
    older = replace(box, devices=(replace(gpu, capability=(8, 0)),) * 4)
    with pytest.raises(ValueError, match="devices must be like those of the box"):
        tuned(layers, devices="cuda:0", box=older)


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], "cuda:0/2"], ids=str)
def test_parts_of_gpus_are_refused(two_gpus: FakeCuda, devices: Any) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match="devices must be CPU workers or whole GPUs, each once"):
        tuned(layers, devices=devices)

"""Copies that torch makes between GPUs, for which the streams of both wait for each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.runtime.microbatch import to_device
from pykern.runtime.stage import skips as parcels
from pykern.runtime.stage import stage
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * by


class Gated(nn.Module):
    """Its last stage uses an argument that no other does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * by


@pytest.mark.parametrize("recompute", [None, "layer"])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_comes_from_the_batch_is_moved_before_any_action(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, recorded: bool, recompute: Any
) -> None:
    """But for the first stage's, where the batch is already."""
    inside: list[int] = []
    active = HostGpus.active

    @contextmanager
    def noted(self: HostGpus, lane: int) -> Iterator[None]:
        inside.append(lane)
        with active(self, lane):
            yield
        inside.pop()

    where: list[int | None] = []

    def moved(tree: Any, device: torch.device) -> Any:
        where.append(inside[-1] if inside else None)
        return to_device(tree, device)

    monkeypatch.setattr(HostGpus, "active", noted)
    monkeypatch.setattr(parcels, "to_device", moved)
    monkeypatch.setattr(stage, "to_device", moved)
    batch = dict(x=torch.randn(4, 4), by=torch.randn(4, 1))
    model: Any = Gated() if recorded else [nn.Linear(4, 4), nn.Linear(4, 4), Scaled()]
    with pykern.Pipeline(
        model,
        devices=["cuda:0", "cuda:1", "cuda:2"],
        microbatches=2,
        loss_fn=torch.sum,
        sample={name: value[:2] for name, value in batch.items()} if recorded else None,
        recompute=recompute,
    ) as pipe:
        if recorded:
            pipe.step(**batch)
        else:
            pipe.step(batch["x"], by=batch["by"])
    assert None in where
    assert set(where) <= {None, 0}

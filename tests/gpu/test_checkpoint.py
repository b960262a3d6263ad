"""Checkpoints of what is on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pykern import checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_run_on_a_gpu_goes_on_there(tmp_path: Path, options: Any) -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    model, optimizer = run()
    step(model, optimizer)
    checkpoint.save(tmp_path / "run.ckpt", model, optimizer)
    losses = [step(model, optimizer) for _ in range(3)]
    other, fresh = run()
    checkpoint.load(tmp_path / "run.ckpt", other, fresh)
    assert all(torch.equal(step(other, fresh), loss) for loss in losses)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert {key: value.device for key, value in ours.items()} == {
            key: value.device for key, value in theirs.items()
        }

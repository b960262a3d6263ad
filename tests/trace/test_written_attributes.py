"""Tensors in attributes, which are neither parameters nor buffers, and which a forward writes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import CutError


class Scaled(nn.Module):
    """Writes to a tensor in an attribute, at the place of the forward that `at` says."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = torch.ones(())
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        if self.at == "before":
            self.scale.mul_(0.9)
        if self.at == "behind":
            x = x * self.scale
        y: Tensor = self.last(self.first(x))
        if self.at != "before":
            self.scale.mul_(0.9)
        return y if self.at == "behind" else y * self.scale.clone()


def pipeline(model: nn.Module) -> pykern.Pipeline:
    return pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule="gpipe",
        microbatches=4,
        loss_fn=F.mse_loss,
        sample=torch.ones(2, 4),
    )


@pytest.mark.parametrize("at", ["before", "behind"])
def test_one_that_several_stages_use_is_refused(at: str) -> None:
    """As for a buffer: a stage found the value of another microbatch there."""
    with pytest.raises(CutError, match="a tensor that it has not made"):
        pipeline(Scaled(at))


def test_one_that_a_single_stage_uses_runs() -> None:
    model, x = Scaled("end"), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        loss = pipe.step(x, target=x)
    losses = [F.mse_loss(plain(part), part) for part in x.chunk(4)]
    assert torch.allclose(loss, torch.stack(losses).mean())
    assert torch.equal(model.scale, plain.scale)

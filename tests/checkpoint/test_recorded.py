"""Models with a forward of their own go on wherever they are cut, tied parameters included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pykern
from pykern import checkpoint
from tests.checkpoint.runs import same
from tests.trace.models import Network


def network(*, tied: bool) -> Network:
    model = Network(width=6)
    if tied:
        last, first = model.get_submodule("blocks.3.down"), model.get_submodule("blocks.0.down")
        last.weight = first.weight
    return model


def loss_of(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.mse_loss(output["all"], target)


class Training:
    """A network in a pipeline, and its optimizer."""

    def __init__(self, devices: str, schedule: str, *, tied: bool) -> None:
        self.tokens = torch.arange(40).view(8, 5) % 10
        self.pipe = pykern.Pipeline(
            network(tied=tied),
            devices=devices,
            schedule=schedule,
            microbatches=4,
            loss_fn=loss_of,
            sample=self.tokens[:2],
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())

    def step(self) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """One of the optimizer; the loss and all that there is after it."""
        self.optimizer.zero_grad()
        loss = self.pipe.step(self.tokens, target=torch.ones(8, 5, 6))
        self.optimizer.step()
        return loss, dict(self.pipe.state_dict()), self.optimizer.state_dict()


@pytest.mark.parametrize(
    ("tied", "others"),
    [
        (False, [("cpu:1", "gpipe"), ("cpu:2", "one_f_one_b"), ("cpu:3", "gpipe")]),
        # Where a tied parameter is used in two stages, bits are those of that cut.
        (True, [("cpu:2", "one_f_one_b"), ("cpu:2", "zb_h1")]),
    ],
)
def test_a_recorded_model_goes_on_in_other_stages(tmp_path, tied, others):
    file = tmp_path / "run.ckpt"
    first = Training("cpu:2", "gpipe", tied=tied)
    first.step()
    checkpoint.save(file, first.pipe, first.optimizer)
    expected = first.step()
    first.pipe.close()
    for devices, schedule in others:
        other = Training(devices, schedule, tied=tied)
        checkpoint.load(file, other.pipe, other.optimizer)
        assert same(other.step(), expected)
        other.pipe.close()


def test_a_recorded_models_checkpoint_is_the_plain_models(tmp_path):
    first = Training("cpu:2", "gpipe", tied=True)
    first.step()
    checkpoint.save(tmp_path / "run.ckpt", first.pipe, first.optimizer)
    model = network(tied=True)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(tmp_path / "run.ckpt", model, optimizer)
    assert same(dict(model.state_dict()), dict(first.pipe.state_dict()))
    assert same(optimizer.state_dict()["state"], first.optimizer.state_dict()["state"])
    tied = model.get_parameter("blocks.0.down.weight")
    assert model.get_parameter("blocks.3.down.weight") is tied
    first.pipe.close()

"""Recorded models, shared parameters and streams, on several devices of one GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.gpu.test_pipeline import DEVICES
from tests.runtime.test_recorded import loss_of
from tests.support.comparison import assert_all_have_gradients, assert_same_gradients
from tests.trace.models import Network

ROWS = 2


def batch_on(home: torch.device) -> tuple[dict[str, Any], Tensor]:
    tokens, mask = torch.randint(0, 10, (8, 5)), torch.rand(8, 5) > 0.3
    # The forward goes another way where all are true, which is not what was captured.
    mask[:, 0] = False
    return {"tokens": tokens.to(home), "mask": mask.to(home)}, torch.randn(8).to(home)


def parts_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    columns = zip(given["tokens"].split(ROWS), given["mask"].split(ROWS), strict=True)
    return [{"tokens": tokens, "mask": mask} for tokens, mask in columns]


def pipeline(model: nn.Module, devices: str, home: torch.device, **options: Any) -> Any:
    usual: dict[str, Any] = {"microbatches": 4, "loss_fn": loss_of}
    sample = parts_of(batch_on(home)[0])[0]
    return pykern.Pipeline(model, devices=DEVICES[devices][0], sample=sample, **usual, **options)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize(
    ("devices", "schedule"), [("the GPU four times", "one_f_one_b"), ("two parts", "hanayo")]
)
def test_a_recorded_model_has_the_plain_models_bits(
    home: torch.device, devices: str, schedule: str, capture: bool
) -> None:
    model = Network(num_blocks=6).to(home)
    plain = copy.deepcopy(model)
    with pipeline(model, devices, home, schedule=schedule, capture=capture) as pipe:
        for _ in range(3):
            given, target = batch_on(home)
            total = torch.zeros((), device=home)
            for part, wanted in zip(parts_of(given), target.split(ROWS), strict=True):
                loss = loss_of(plain(**part), wanted) * (ROWS / 8)
                loss.backward()
                total = total + loss.detach()
            assert torch.equal(pipe.step(**given, target=target), total)
            assert_same_gradients(pipe, plain)
            assert_all_have_gradients(plain)


def test_a_stream_has_the_outputs_of_calls(home: torch.device) -> None:
    model = Network(num_blocks=6).to(home).eval()
    batches = [batch_on(home)[0] for _ in range(3)]
    with pipeline(model, "the GPU four times", home) as pipe:
        for given, output in zip(batches, list(pipe.stream(batches)), strict=True):
            with torch.no_grad():
                expected = torch.cat([model(**part)["all"] for part in parts_of(given)])
            assert torch.equal(output["all"], expected)


def test_a_tied_weight_gets_one_gradient(home: torch.device) -> None:
    model = Network(num_blocks=4)
    model.blocks[3].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    model = model.to(home)
    plain = copy.deepcopy(model)
    with pipeline(model, "the GPU twice", home) as pipe:
        given, target = batch_on(home)
        pipe.step(**given, target=target)
        for part, wanted in zip(parts_of(given), target.split(ROWS), strict=True):
            (loss_of(plain(**part), wanted) * (ROWS / 8)).backward()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

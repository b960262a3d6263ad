"""Modules that are named to stay whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import CutError

from .passing import WIDTH, assert_same


class Decoder(nn.Module):
    """Reads what it has computed, so that it cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.abs().max() > 0.9:
                x = x / 2
        return x


class Detector(nn.Module):
    """Most of its parameters are in the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.backbone:
            x = torch.relu(layer(x))
        return self.head(self.decoder(x))


def test_a_module_that_cannot_be_looked_into_does_not_keep_others_from_being_cut() -> None:
    """It has more than a stage's share, so it was looked into, and the model refused."""
    sample = torch.randn(2, WIDTH)
    with pytest.raises(CutError, match="reads the values of a tensor"):
        pykern.Pipeline(Detector(), devices="cpu:2", microbatches=2, sample=sample)
    assert_same(Detector(), 2, whole=["decoder"])
    pipe = pykern.Pipeline(
        Detector(), devices="cpu:3", microbatches=2, sample=sample, whole=("decoder",)
    )
    with pipe:
        assert pipe.partition.layer_names == ("backbone.0", "backbone.1", "decoder", "head")


def test_the_report_takes_it_too() -> None:
    sample = torch.randn(2, WIDTH)
    assert pykern.explain_cut(Detector(), sample).startswith("The model cannot be cut: ")
    report = pykern.explain_cut(Detector(), sample, whole=["decoder"]).splitlines()
    assert [line.split()[0] for line in report[1:]] == [
        "backbone.0", "backbone.1", "decoder", "head"
    ]  # fmt: skip


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detector = Detector()

    def forward(self, x: Tensor) -> Tensor:
        return self.detector(x)


def test_names_may_be_nested() -> None:
    names = ["detector.decoder", "detector.backbone.0"]
    assert_same(Outer(), 2, whole=names, split_at=["detector.decoder"])


@pytest.mark.parametrize(
    ("whole", "error", "message"),
    [
        (["decodr"], CutError, r"whole must hold names of modules in the model, got 'decodr'; it"),
        ([""], CutError, r"whole must hold names of modules in the model, got ''"),
        (["backbone"], CutError, r"got 'backbone', which is a ModuleList; name the module around"),
        ("decoder", TypeError, r"whole must be a list of names of modules, got 'decoder'"),
        ([3], TypeError, r"whole must be a list of names of modules, got \[3\]"),
    ],
)
def test_names_that_are_none_are_refused(whole: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pykern.Pipeline(
            Detector(), devices="cpu:2", microbatches=2, sample=torch.randn(2, WIDTH), whole=whole
        )


def test_a_stage_cannot_begin_in_what_stays_whole() -> None:
    with pytest.raises(
        CutError,
        match=r"split_at must name modules outside of those that stay whole \(whole=\[...\]\), "
        r"got 'decoder.layers.3', which is within 'dec",
    ):
        pykern.Pipeline(
            Detector(),
            devices="cpu:2",
            microbatches=2,
            sample=torch.randn(2, WIDTH),
            split_at=["decoder.layers.3"],
            whole=["decoder"],
        )


def test_layers_of_a_chain_are_whole_anyway() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    options: dict[str, Any] = {"devices": "cpu:2", "microbatches": 2, "loss_fn": F.mse_loss}
    pykern.Pipeline(layers, whole=["0", "1.0"], **options).close()
    with pytest.raises(CutError, match="whole must hold names of modules in the model, got '3'"):
        pykern.Pipeline(layers, whole=["3"], **options)


@pytest.mark.parametrize("num_stages", [0, -1])
def test_a_report_for_no_stages_is_refused(num_stages: int) -> None:
    """It divided by zero, or took -1 for a number of stages."""
    with pytest.raises(ValueError, match=f"num_stages must be 1 to 16777216, got {num_stages}"):
        pykern.explain_cut(Detector(), torch.randn(2, WIDTH), num_stages=num_stages)

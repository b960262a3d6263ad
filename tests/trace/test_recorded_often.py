"""A forward that is recorded for batch after batch gets a warning, once, that says why."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

SCALE = 1.0


class Inner(nn.Module):
    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rate = 1.0
        self.register_buffer("gate", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.rate * SCALE * self.gate.item()
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


Between = Callable[[Model, int], object]


def _steps(count: int, between: Between, rows: Callable[[int], int] = lambda _: 4) -> list[str]:
    """The messages of the warnings in some steps; all of them are given at a line of this file."""
    model = Model()
    sample = torch.randn(2, 4)
    with (
        pykern.Pipeline(
            model,
            devices="cpu:2",
            microbatches=2,
            loss_fn=F.mse_loss,
            sample=sample,
            split_at=["last.linear"],
        ) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for number in range(count):
            between(model, number)
            x = torch.randn(rows(number), 4)
            pipe.step(x, target=x)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def _set_global(_: Model, number: int) -> None:
    globals()["SCALE"] = number + 2.0


CASES: dict[str, tuple[Between, str]] = {
    "attribute": (
        lambda model, number: setattr(model.last, "rate", number + 2.0),
        r"The forward may read last\.rate, which changed for each batch\. Hold such numbers",
    ),
    "global": (_set_global, r"The forward may read SCALE, which changed"),
    "tensor": (
        lambda model, number: model.last.gate.fill_(number + 2.0),
        r"The forward reads values of tensors, .* Keep the module .* whole \(whole=\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_named_once(case: str) -> None:
    between, message = CASES[case]
    try:
        (text,) = _steps(40, between)
        with pytest.raises(UserWarning, match=message):
            raise UserWarning(text)
    finally:
        globals()["SCALE"] = 1.0


def test_shapes_that_are_new_in_each_step() -> None:
    (text,) = _steps(20, lambda *_: None, rows=lambda number: 6 + 2 * number)
    assert "Shapes of inputs" in text
    assert "for each of the last 16 batches" in text


def test_a_forward_that_is_recorded_now_and_then_gets_no_warning() -> None:
    def between(model: Model, number: int) -> None:
        if number % 16 < 15:
            model.last.rate += 1.0

    assert _steps(40, between) == []

"""State that a forward looks at beside its inputs may change from call to call."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern.trace import CutError, Traced, tape_cache
from pykern.trace.cut_tape import CutTape
from tests.trace.test_trace import num_tapes, replay


class Layers(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.gate = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.scale: Any = 1.0
        self.options = SimpleNamespace(scales=[1.0, 2.0])

    def forward(self, x: Tensor, given: Any = 1.0) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.after(x, given)

    def after(self, x: Tensor, given: Any) -> Tensor:
        for scale in self.options.scales:
            x = x * scale
        given = getattr(given, "scale", given)
        x = x.to(self.gate.dtype) * self.scale
        return x * float(given if isinstance(given, float) else given.sum())


def assert_follows(traced: Traced, model: nn.Module, *args: Any) -> None:
    traced.refresh()
    assert torch.equal(replay(traced, *args), model(*args))


CHANGES = {
    "a number": lambda model: setattr(model, "scale", 3.0),
    "a tensor": lambda model: setattr(model, "scale", torch.full((4,), 5.0)),
    "an attribute of an attribute": lambda model: setattr(model.options, "scales", [4.0]),
    "a list": lambda model: model.options.scales.append(3.0),
    "a type": lambda model: setattr(model, "gate", nn.Parameter(torch.ones(()).double())),
    "a forward": lambda model: setattr(model, "forward", lambda x: model.layers[0](x) * 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_forward_looks_at_may_change(change: str) -> None:
    model, x = Layers(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    assert_follows(traced, model, x)
    before = model(x)
    CHANGES[change](model)
    assert_follows(traced, model, x)
    after = model(x)
    assert after.dtype != before.dtype or not torch.equal(after, before)


def test_numbers_that_are_equal_and_not_the_same_are_told_apart() -> None:
    model, x = Layers(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    for number in (0.0, -0.0, 0.0, -0.0):
        ours, theirs = replay(traced, x, number), model(x, number)
        assert torch.equal(torch.signbit(ours), torch.signbit(theirs))
    for _ in range(3):
        assert replay(traced, x, float("nan")).isnan().all()
    assert num_tapes(traced) == 4


def test_arguments_of_any_kind_are_compared_by_what_they_hold() -> None:
    """Those without a hash went by their place in memory, which the next one has as well."""
    model, x = Layers(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    for number in range(4):
        assert_follows(traced, model, x, np.arange(3.0) + number)
    array, options = np.arange(3.0), SimpleNamespace(scale=1.0)
    for _ in range(2):
        assert_follows(traced, model, x, array)
        assert_follows(traced, model, x, options)
        array += 1
        options.scale += 1


class Reading(Layers):
    def after(self, x: Tensor, given: Any) -> Tensor:
        return (x * 2 if self.gate.item() > 0 else x * 3) * self.gate


def test_what_the_forward_reads_of_a_parameter_is_read_again() -> None:
    model, x = Reading(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    for gate in (1.0, -1.0, 1.0, -1.0):
        nn.init.constant_(model.gate, gate)
        assert_follows(traced, model, x)
    assert num_tapes(traced) == 2


class Counting(Layers):
    def after(self, x: Tensor, given: Any) -> Tensor:
        self.calls += 1
        return x


class Warming(Layers):
    def after(self, x: Tensor, given: Any) -> Tensor:
        if self.count < 3:
            x = x * 2
        self.count += 1
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counting, r"the forward changes Counting\.calls, which would not be repeated"),
        (Warming, r"test_state\.py:\d+ reads the value of count, .* the forward writes into it"),
    ],
)
def test_what_depends_on_the_calls_before_is_refused(kind: type[Layers], message: str) -> None:
    with pytest.raises(CutError, match=message):
        Traced(kind(), ((torch.randn(2, 4),), {}), 3)


def test_a_hook_that_comes_later_is_refused() -> None:
    model, x = Layers(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    hook = model.register_forward_hook(lambda *_: None)
    with pytest.raises(CutError, match="has hooks, which would not be called"):
        traced.refresh()
    hook.remove()
    assert_follows(traced, model, x)


def test_cut_tapes_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_cache, "MAX_CUT_TAPES", 3)
    model = Layers()
    traced = Traced(model, ((torch.randn(1, 4),), {}), 3)

    def cut_tape(rows: int) -> CutTape:
        return traced.environments([((torch.randn(rows, 4),), {})])[0].cut_tape

    first = [cut_tape(rows) for rows in (1, 2, 3)]
    assert cut_tape(1) is first[0]
    cut_tape(4)
    assert num_tapes(traced) == 3
    assert cut_tape(1) is first[0]
    assert cut_tape(2) is not first[1]
    assert_follows(traced, model, torch.randn(2, 4))


def test_ways_for_the_same_shapes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_cache, "MAX_CUT_TAPES", 3)

    class OfGate(Layers):
        def after(self, x: Tensor, given: Any) -> Tensor:
            return x * self.gate.item()

    model, x = OfGate(), torch.randn(2, 4)
    traced = Traced(model, ((x,), {}), 3)
    for gate in range(5):
        nn.init.constant_(model.gate, gate)
        assert_follows(traced, model, x)
        assert num_tapes(traced) <= 3


class InTypeOfBuffer(nn.Module):
    """Goes on in the type of a buffer, which is not that of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6).double() for _ in range(2))
        self.register_buffer("scale", torch.ones(6))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).to(self.scale.dtype) / 3
        out: torch.Tensor = self.second((y * self.scale).double())
        return out


def test_another_type_of_buffers_alone_is_recorded_anew() -> None:
    """The recorded forward went on in the type that the buffer had before."""
    x = torch.randn(4, 6).double()
    model = InTypeOfBuffer()
    with (
        pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=x[:2]) as pipe,
        torch.no_grad(),
    ):
        for change in (lambda: pipe, pipe.double, pipe.double):
            change()
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split(2)]))
    assert model.scale.dtype == torch.float64

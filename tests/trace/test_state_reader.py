"""Numbers beside the inputs that a recorded forward reads: each step has those of now."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace.state_reader import StateReader

ARGS = argparse.Namespace(rate=1.0, other=1.0)
NUMBERS = {"rate": 1.0}
RATE = 1.0


class OfClass:
    shared = 1.0
    table: ClassVar[dict[str, float]] = {"rate": 1.0}


def helper() -> float:
    return ARGS.rate


def around() -> tuple[Callable[[], float], Callable[[float], None]]:
    rate = 1.0

    def get() -> float:
        return rate

    def put(value: float) -> None:
        nonlocal rate
        rate = value

    return get, put


GET, PUT = around()


class Model(OfClass, nn.Module):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.read = read
        self.config = SimpleNamespace(train=SimpleNamespace(loss=SimpleNamespace(rate=1.0)))
        self.nested = {"train": {"loss": [{"rate": 1.0}]}}
        self.steps = SimpleNamespace(count=SimpleNamespace(total=0))

    @property
    def rate(self) -> float:
        return float(self.config.train.loss.rate)

    def method(self) -> float:
        return float(self.nested["train"]["loss"][0]["rate"])

    def forward(self, x: Tensor) -> Tensor:
        match self.read:
            case "property":
                rate = self.rate
            case "method":
                rate = self.method()
            case "attribute of a class":
                rate = self.shared
            case "dict of a class":
                rate = self.table["rate"]
            case "arguments":
                rate = ARGS.rate
            case "function":
                rate = helper()
            case "global":
                rate = RATE
            case "global dict":
                rate = NUMBERS["rate"]
            case _:
                rate = GET()
        y: Tensor = self.last(self.first(x) * rate)
        return y


def _set_global(_: Model, value: float) -> None:
    globals()["RATE"] = value


WAYS: dict[str, Callable[[Model, float], Any]] = {
    "property": lambda model, value: setattr(model.config.train.loss, "rate", value),
    "method": lambda model, value: model.nested["train"]["loss"][0].update(rate=value),
    "attribute of a class": lambda _, value: setattr(OfClass, "shared", value),
    "dict of a class": lambda _, value: OfClass.table.update(rate=value),
    "arguments": lambda _, value: setattr(ARGS, "rate", value),
    "function": lambda _, value: setattr(ARGS, "rate", value),
    "global": _set_global,
    "global dict": lambda _, value: NUMBERS.update(rate=value),
    "function around": lambda _, value: PUT(value),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_changes_is_read_again(way: str) -> None:
    torch.manual_seed(0)
    model, x = Model(way), torch.randn(8, 4)
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=4, loss_fn=F.mse_loss, sample=x[:2]
    ) as pipe:
        try:
            for value in (1.0, 0.5, 1.0):
                WAYS[way](model, value)
                losses = [F.mse_loss(model(part), part) / 4 for part in x.split(2)]
                plain = losses[0] + losses[1] + losses[2] + losses[3]
                assert torch.equal(pipe.step(x, target=x), plain)
        finally:
            WAYS[way](model, 1.0)


def test_the_state_is_one_object_until_it_changes() -> None:
    # An attribute has this name.
    globals()["first"] = 1.0
    model = Model("property")
    reader = StateReader(model, [model])
    before = reader.now()
    assert reader.now() is before
    # No code names these, deep as they are.
    model.steps.count.total += 1
    ARGS.other += 1.0
    globals()["first"] = 3.0
    assert reader.now() is before
    model.config.train.loss.rate = 0.5
    changed = reader.now()
    assert changed != before
    model.config.train.loss.rate = 1.0
    assert reader.now() == before


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Config:
    rate = 1.0


class Odd:
    """Raises what it likes."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise LookupError

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


THINGS: dict[str, Any] = {"it": None}
SPACE = ModuleType("settings")
SPACE.rate = 1.0  # type: ignore[attr-defined]


def undecorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.Module, x: Tensor) -> Any:
        return forward(self, x * THINGS["it"])

    return call


class Reads(nn.Module):
    @undecorated
    def forward(self, x: Tensor) -> Tensor:
        thing = THINGS["it"]
        for name in ("scale", "key"):
            x = x * getattr(thing, name)
        return x * Config.rate * float(SPACE.rate)


CHANGES: dict[str, tuple[Any, Any]] = {
    "members": (Colour.RED, Colour.BLUE),
    "keys": ({"a": True}, {"b": True}),
    "lengths": ([[1], [2, 3]], [[1, 2], [3]]),
    "numbers of numpy": (np.float32(1), np.float32(2)),
    "slots": (Slots(1.0), Slots(2.0)),
    "functions": (len, abs),
    "types": (1, True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_differ_have_other_states(change: str) -> None:
    model = Reads()
    one, other = CHANGES[change]
    THINGS["it"] = one
    reader = StateReader(model, [model])
    before = reader.now()
    THINGS["it"] = other
    assert reader.now() != before
    THINGS["it"] = one
    assert reader.now() == before


def test_a_slot_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reads()
    THINGS["it"] = Slots()
    reader = StateReader(model, [model])
    before = reader.now()
    THINGS["it"].scale = 2.0
    between = reader.now()
    assert between != before
    monkeypatch.setattr(Config, "rate", 2.0)
    after = reader.now()
    assert after != between
    monkeypatch.setattr(SPACE, "rate", 2.0)
    assert reader.now() != after


def test_odd_objects_are_left_alone() -> None:
    model = Reads()
    THINGS["it"] = Odd()
    reader = StateReader(model, [model])
    assert reader.now() is reader.now()


CALLS = {"forward": 0}


class Counts(Model):
    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return super().forward(x)


def test_what_a_recording_changes_is_no_state() -> None:
    """Else every step would record the forward again."""
    model = Counts("global")
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss, sample=torch.randn(2, 4)
    ) as pipe:
        before = CALLS["forward"]
        for rows in (4, 6, 4, 6, 4, 6, 6):
            x = torch.randn(rows, 4)
            pipe.step(x, target=x)
        # The other size is recorded, then both, because the counter does not count any more.
        assert CALLS["forward"] - before <= 3


LOG: dict[str, list[int]] = {}
SHARED = [1.0]
TABLES = {"one": SHARED, "other": SHARED}


class Logs(nn.Module):
    """A recording of it leaves a new list in one place, and changes nothing in another."""

    def forward(self, x: Tensor) -> Tensor:
        LOG[str(len(LOG))] = []
        return x * TABLES["one"][0]


def test_a_change_in_one_place_is_none_in_another() -> None:
    model = Logs()
    reader = StateReader(model, [model])
    reader.now()
    with reader.recording():
        model(torch.ones(1))
    before = reader.now()
    SHARED[0] = 2.0
    assert reader.now() != before
    SHARED[0] = 1.0
    assert reader.now() == before

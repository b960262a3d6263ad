"""Models that have one parameter, buffer or module under several names."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
from torch import Tensor, nn

from pykern.interop import pipelining
from pykern.interop.pipelining import SplitPoint, pipe_split, pipeline
from tests.interop.cases import CPU, WIDTH, batch, close, loss_fn
from tests.interop.test_pipe_marks import Again, Three, by_microbatch, expect_same_bits

BEGINNING, END = SplitPoint.BEGINNING, SplitPoint.END


class SharedWeight(Three):
    """Two modules with one weight, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight


class SharedWithin(Three):
    """Two modules with one weight, in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


class OwnName(Three):
    """A parameter of a module that the model has a name of its own for, and uses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.b.weight

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) @ self.own


class SecondName(Three):
    """A module with two names, which is called by the second."""

    def __init__(self) -> None:
        super().__init__()
        self.d = self.a

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.d(x)))


class BothNames(SecondName):
    """A module that is called by both of its names."""

    def forward(self, x: Tensor) -> Any:
        return self.d(self.b(self.a(x)))


class Listed(Three):
    """Modules that are in a list as well, and called from there."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([self.a, self.b, self.c])

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Inner(Three):
    """A module within another one, which the model has a name of its own for."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.inner = self.block[0]

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.c(self.block(self.a(x))))


class Everything(Three):
    """A parameter and a module, each used in both stages under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.d = self.a

    def forward(self, x: Tensor) -> Any:
        start = torch.mm(x, self.first)
        x = torch.tanh(self.a(start + x))
        pipe_split()
        x = torch.tanh(self.d(torch.mm(x, self.second)))
        pipe_split()
        return self.c(torch.mm(x + start, self.first))


CASES: list[tuple[type[Three], dict[str, SplitPoint] | None]] = [
    (Again, None),
    (Everything, None),
    (SharedWeight, {"b": BEGINNING, "c": BEGINNING}),
    (SharedWithin, {"b": BEGINNING, "c": BEGINNING}),
    (SharedWithin, {"c": BEGINNING}),
    (OwnName, {"b": BEGINNING, "c": BEGINNING}),
    (SecondName, {"b": BEGINNING}),
    (SecondName, {"d": END}),
    (SecondName, {"a": END}),
    (BothNames, {"b": END}),
    (Listed, {"b": BEGINNING, "c": BEGINNING}),
    (Listed, {"parts.1": BEGINNING}),
    (Inner, {"block": BEGINNING, "c": BEGINNING}),
]


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
@pytest.mark.parametrize(("kind", "splits"), CASES)
def test_gradients_are_those_of_the_plain_model(kind: type[Three], splits: Any, name: str) -> None:
    torch.manual_seed(1)
    model, (x, y) = kind().double(), batch()
    expected, gradients = by_microbatch(model, x, y)
    pipe = pipeline(model, (x[:2],), split_spec=splits)
    stages = [pipe.build_stage(index, CPU) for index in range(pipe.num_stages)]
    schedule = pipelining.get_schedule_class(name)(stages, 4, loss_fn=loss_fn)
    expect_same_bits(schedule.step(x, target=y), expected)
    # The gradients of shared parameters are summed in another order.
    close({name: it.grad for name, it in model.named_parameters()}, gradients)


@pytest.mark.parametrize(("kind", "splits"), CASES)
def test_states_of_all_stages_together_have_all_names_of_the_model(
    kind: type[Three], splits: Any
) -> None:
    model = kind()
    pipe = pipeline(model, (torch.randn(2, WIDTH),), split_spec=splits)
    whole = model.state_dict(keep_vars=True)
    found: dict[str, Any] = {}
    for index in range(pipe.num_stages):
        found |= pipe.get_stage_module(index).state_dict(keep_vars=True)
    used = {name for name in whole if whole[name] in _used(model)}
    assert found.keys() == used
    assert all(found[name] is whole[name] for name in found)


class _Identities(set[int]):
    def __contains__(self, it: object) -> bool:
        return super().__contains__(id(it))


def _used(model: nn.Module) -> _Identities:
    """The parameters that a backward reaches."""
    model(torch.randn(2, WIDTH)).sum().backward()
    return _Identities(id(it) for it in model.parameters() if it.grad is not None)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export, about itself
@pytest.mark.parametrize(("kind", "splits"), CASES)
def test_a_stage_has_the_names_of_torchs(kind: type[Three], splits: Any) -> None:
    x, model = torch.randn(2, WIDTH), kind()
    ours = pipeline(model, (x,), split_spec=splits)
    pipe = theirs.pipeline(deepcopy(model), (x,), split_spec=splits)
    assert ours.num_stages == pipe.num_stages
    for index in range(ours.num_stages):
        found, expected = (each.get_stage_module(index).state_dict() for each in (ours, pipe))
        # torch gives some of the names, not always the same ones.
        assert {name.replace("@1", "") for name in expected} <= found.keys()


class Tables(nn.Module):
    """A module with a buffer that states leave out, and one that is written."""

    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.register_buffer("count", torch.zeros(()))


class Buffers(Three):
    """Buffers that the forward of the model itself uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = Tables()
        self.same = self.tables

    def forward(self, x: Tensor) -> Any:
        x = self.a(x) * self.tables.table
        return self.c(self.b(x)) + self.same.count


def test_a_buffer_that_states_leave_out_is_left_out() -> None:
    model = Buffers()
    pipe = pipeline(model, (torch.randn(2, WIDTH),), split_spec={"b": BEGINNING})
    first, second = (pipe.get_stage_module(index) for index in range(2))
    assert list(first.state_dict()) == ["a.weight", "a.bias"]
    assert first.get_buffer("same.table") is first.get_buffer("tables.table") is model.tables.table
    assert {"tables.count", "same.count"} <= second.state_dict().keys() <= model.state_dict().keys()

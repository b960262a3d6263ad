"""Calls with equal keys are given tensors and other values alike."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from pykern.partition.chain import RecordedChain
from pykern.trace.key import key_of_call
from tests.support.pipelines import small

X, Y = torch.ones(2, 3), torch.zeros(2, 3)


def key(*args: object, **kwargs: object) -> object:
    return key_of_call((args, kwargs))[1]


def test_values_of_tensors_are_not_in_the_key():
    assert key(X, Y) == key(Y, X)
    assert hash(key(X, Y)) == hash(key(Y, X))


@pytest.mark.parametrize(
    "other",
    [
        key(X, X),
        key(X),
        key((X, Y)),
        key(X, b=Y),
        key(X, Y[:1]),
        key(X, Y.double()),
        key(X, Y.t().contiguous().t()),
        key(X, Y.to_sparse()),
        key(X, Y.clone().requires_grad_()),
        key(X, 0),
        key(X, Y, None),
    ],
)
def test_calls_that_differ_have_other_keys(other: object) -> None:
    assert key(X, Y) != other


class AsksForLayout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if not x.is_contiguous():
            y = y * 2
        out: Tensor = self.second(y)
        return out


def test_a_forward_may_ask_for_the_layout_of_its_input() -> None:
    """The answer for the sample was that for all batches, without an error."""
    model, x = AsksForLayout(), torch.randn(3, 4).t()
    with small(model, sample=torch.randn(2, 3)) as pipe, torch.no_grad():
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.split(2)]))
        assert torch.equal(pipe(x.contiguous()), model(x.contiguous()))


def test_a_tensor_that_is_given_twice_is_one_tensor():
    tensors, _ = key_of_call(((X, Y, X), {"a": [Y]}))
    assert [id(tensor) for tensor in tensors] == [id(X), id(Y)]


class Blocks(nn.Module):
    """Its own forward calls blocks one after another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calls_of_enter(num_blocks: int) -> Counter[str]:
    """The functions of Python that a known call of a recorded model enters."""
    chain = RecordedChain(Blocks(num_blocks), X, 2)
    chain.enter([((X,), {})])
    entered: Counter[str] = Counter()

    def notice(frame: FrameType, event: str, _: object) -> None:
        # Comprehensions have frames of their own in Pythons before 3.12.
        if event == "call" and not frame.f_code.co_name.endswith(("comp>", "genexpr>")):
            entered[frame.f_code.co_qualname] += 1

    sys.setprofile(notice)
    try:
        chain.enter([((X,), {})])
    finally:
        sys.setprofile(None)
    return entered


def test_a_known_call_is_found_by_as_many_calls_for_any_number_of_blocks() -> None:
    few, many = calls_of_enter(4), calls_of_enter(40)
    assert few == many
    # Each microbatch pays for them. A number that rises has to be found.
    assert sum(few.values()) <= 10, few

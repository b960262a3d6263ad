"""While one thread records a model, others go on as if nobody did."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.trace import Traced
from tests.trace.test_trace import replay


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Meanwhile(nn.Module):
    """Lets something happen within its forward."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.do = do

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.do()
        return x


def patched() -> tuple[Any, Any]:
    return nn.Module.__call__, torch.autograd.Function.__dict__["apply"]


def test_calls_of_other_threads_are_not_recorded() -> None:
    x, found = torch.randn(2, 4, requires_grad=True), []

    def elsewhere() -> None:
        found.append((model.layers[0](x), Twice.apply(x)))

    def do() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    model, before = Meanwhile(do), patched()
    traced = Traced(model, ((x,), {}), 3)
    assert patched() == before
    assert list(traced.segments) == ["layers.0", "layers.1", "layers.2"]
    assert torch.equal(replay(traced, x), model(x))
    for linear, twice in found:
        assert torch.equal(linear, model.layers[0](x))
        assert torch.equal(twice, 2 * x)
    assert len(found) == 6


def test_two_threads_record_at_once() -> None:
    both, before = threading.Barrier(2, timeout=30), patched()
    x, traced = torch.randn(2, 4), []

    def record() -> None:
        traced.append(Traced(Meanwhile(both.wait), ((x,), {}), 3))

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patched() == before
    assert [list(one.segments) for one in traced] == [["layers.0", "layers.1", "layers.2"]] * 2


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_ends_a_recording_leaves_nothing_behind(error: BaseException) -> None:
    def do() -> None:
        raise error

    before = patched()
    with pytest.raises(type(error)) as raised:
        Traced(Meanwhile(do), ((torch.randn(2, 4),), {}), 3)
    assert raised.value is error
    assert patched() == before

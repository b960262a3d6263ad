"""An interrupt at any line of a recording leaves the process, and the model, as they were."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.trace import Traced
from tests.diagonal import nightly
from tests.interrupts import at_every_line
from tests.trace.test_trace import replay

WIDTH = 4


class Block(nn.Module):
    """Draws, and counts in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(torch.tanh(self.linear(x)), 0.1)


class Model(nn.Module):
    """Blocks, called under modes that the forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        # A value that Python reads is read again for every batch.
        scale = 2.0 if x.shape[0] > 0 and bool((x[0, 0] < 100).item()) else 1.0
        for block in self.blocks:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = block(x) * scale
            with torch.no_grad():
                x = x + 0 * x.sum()
        return x.float()


SAMPLE = torch.ones(2, WIDTH)


def record(model: nn.Module) -> Callable[[], object]:
    return lambda: Traced(model, ((SAMPLE,), {}), 3)


def explain(model: nn.Module) -> Callable[[], object]:
    return lambda: pykern.explain_cut(model, SAMPLE, num_stages=3)


def record_new_shape(model: nn.Module) -> Callable[[], object]:
    """As a batch of another size does, within a pipeline."""
    traced = Traced(model, ((SAMPLE,), {}), 3)
    return lambda: traced.environments([((torch.ones(3, WIDTH),), {})])


def find_marks(model: nn.Module) -> Callable[[], object]:
    from pykern.interop import pipelining  # noqa: PLC0415 - refused before torch 2.13

    marks = {"blocks.1": pipelining.SplitPoint.BEGINNING}
    return lambda: pipelining.pipeline(model, (SAMPLE,), split_spec=marks)


WAYS = [record, explain, record_new_shape]
if torch.__version__ >= "2.13":
    WAYS.append(find_marks)


@pytest.mark.parametrize(
    ("way", "stride"), [*((way, 661) for way in WAYS), *(nightly(way, 7) for way in WAYS)]
)
def test_an_interrupted_recording_leaves_no_trace(
    way: Callable[[nn.Module], Callable[[], object]], stride: int
) -> None:
    torch.manual_seed(0)
    model = Model()
    way(model)()
    state = copy.deepcopy(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    tape = Traced(model, ((SAMPLE,), {}), 3)
    torch.manual_seed(1)
    expected = replay(tape, SAMPLE)

    def prepare() -> Callable[[], object]:
        model.load_state_dict(state)
        torch.set_rng_state(random)
        return way(model)

    def check(where: str) -> None:
        assert all(map(torch.equal, model.state_dict().values(), state.values())), where
        assert [set(vars(module)) for module in model.modules()] == attributes, where
        assert torch.equal(torch.get_rng_state(), random), where
        torch.manual_seed(1)
        again = Traced(model, ((SAMPLE,), {}), 3)
        torch.manual_seed(1)
        assert torch.equal(replay(again, SAMPLE), expected), where

    assert at_every_line(prepare, check, stride) > 5

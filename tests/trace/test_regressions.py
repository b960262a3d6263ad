"""Forwards that once could not be cut, each with what was wrong."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pykern
from pykern.trace import CutError, ReplayError, Traced
from tests.trace.test_trace import num_tapes, replay


class OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x


def test_a_list_of_parameters_is_not_called() -> None:
    """It has a __call__, which says so, and was taken for a module that has to stay whole."""
    model, x = OfParameters(), torch.randn(5, 4)
    traced = Traced(model, ((x,), {}), 3)
    assert list(traced.segments) == ["weights.0", "weights.1", "weights.2"]
    assert torch.equal(replay(traced, x), model(x))


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.into(x), lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.out(y)


def test_a_named_tuple_is_put_together_without_its_type_looking_at_it() -> None:
    """A PackedSequence asks its parts for their devices, which what stands for tensors has none."""
    model, x, lengths = Packing(), torch.randn(3, 5, 4), torch.tensor([3, 5, 1])
    traced = Traced(model, ((x, lengths), {}), 3)
    assert torch.equal(replay(traced, x, lengths), model(x, lengths))
    assert num_tapes(traced) == 1
    # As long, and thus of the same shapes.
    again = torch.tensor([2, 2, 5])
    assert torch.equal(replay(traced, x, again), model(x, again))
    with pytest.raises(ReplayError, match=r"_pack_padded_sequence \(test_regressions.py:\d+\)"):
        replay(traced, x, torch.tensor([2, 2, 3]))


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 2
        half = y[:, :2]
        y += self.second(y)
        return y[:, 2:] * half


def test_where_a_write_would_be_lost_is_known_before_the_first_step() -> None:
    """The tape of the sample was thrown away, and the next one refused in a step."""
    options = {"devices": "cpu:2", "microbatches": 2, "sample": torch.randn(3, 4)}
    with pytest.raises(CutError, match=r"test_regressions\.py:\d+ writes into a tensor of an"):
        pykern.Pipeline(Writing(), **options)  # type: ignore[arg-type]


# Told as a FutureWarning since torch 2.14.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@torch.no_grad()
@pytest.mark.parametrize(
    "wrap",
    [
        torch.jit.script,
        pytest.param(partial(torch.compile, backend="eager"), marks=pytest.mark.nightly),
    ],
)
def test_what_is_compiled_or_scripted_stays_whole(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """They were taken for lists of modules, which are not called."""
    model, x = OfParts(), torch.randn(2, 4)
    model.second = wrap(model.second)
    traced = Traced(model, ((x,), {}), 3)
    assert list(traced.segments) == ["first", "second", "third"]
    assert torch.equal(replay(traced, x), model(x))
    with pytest.raises(CutError, match=r"the model .* is (compiled|scripted) as a whole"):
        Traced(wrap(OfParts()), ((x,), {}), 2)


class OfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def test_what_is_not_finite_is_named_in_a_recorded_model() -> None:
    """The values on their way had no names for torch's trees, which was an error of its own."""
    model, x = OfParts(), torch.randn(4, 4)
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, sample=x[:2], check_finite="activations"
    ) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(x[:2]), model(x[2:])]))
        nn.init.constant_(model.first.bias, torch.inf)
        with pytest.raises(FloatingPointError, match="first"):
            pipe(x)

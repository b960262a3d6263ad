"""Forwards that once could not be cut, each with what was wrong."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

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
    with pytest.raises(CutError, match=r"test_regressions\.py:\d+, in stage 1, writes into a ten"):
        pykern.Pipeline(Writing(), **options)  # type: ignore[arg-type]


# Told as a FutureWarning since torch 2.14, and otherwise in Python 3.14.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")
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


class Returns(OfParts):
    """Also a parameter and buffers, some of which nothing else uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale, self.table, self.first.weight


def test_a_parameter_or_buffer_may_be_returned() -> None:
    """A bare KeyError, in the report as well."""

    def loss(output: Any) -> Tensor:
        y, scale, table, weight = output
        return y.square().mean() + (scale.square().sum() + weight.sum()) * table.sum()

    model, x = Returns(), torch.randn(4, 4)
    assert pykern.explain_cut(model, x[:2]).count("\n") == 3
    for part in x.split(2):
        (loss(model(part)) / 2).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=2, loss_fn=loss, sample=x[:2], split_at=["second"]
    ) as pipe:
        pipe.step(x)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient)


class WritesInput(OfParts):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


def test_a_forward_may_write_into_its_input() -> None:
    """Later microbatches wrote into the batch, of which the graphs of earlier ones have parts."""
    model, x, y = WritesInput(), torch.randn(4, 4), torch.randn(4, 4)
    for part, target in zip(x.clone().split(2), y.split(2), strict=True):
        (F.mse_loss(model(part.clone()), target) / 2).backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    before = x.clone()
    options = {"devices": "cpu:2", "microbatches": 2, "sample": x[:2], "loss_fn": F.mse_loss}
    with pykern.Pipeline(model, **options) as pipe:  # type: ignore[arg-type]
        pipe.step(x, target=y)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    assert torch.equal(x, before)


class Differentiates(OfParts):
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return slope


class Hooked(OfParts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda gradient: gradient * 2)
        return self.third(self.second(y))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Differentiates,
            r"runs a backward \(torch.autograd\) in the forward, through a graph that stages "
            r"cut",
        ),
        (Hooked, r"registers a hook for a gradient \(register_hook\), which would not be repeated"),
    ],
)
def test_forwards_that_failed_late_or_were_not_repeated(
    kind: type[nn.Module], message: str
) -> None:
    """In the backward of a step, in a replay, or, with the hook, never."""
    with pytest.raises(CutError, match=rf"test_regressions\.py:\d+ {message}"):
        Traced(kind(), ((torch.randn(2, 4),), {}), 2)
    report = pykern.explain_cut(kind(), torch.randn(2, 4))
    assert report.startswith("The model cannot be cut: test_regressions.py:")


class Scales(OfParts):
    """Scales a weight when it is called first in a mode, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_scaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.is_scaled:
            with torch.no_grad():
                self.first.weight.mul_(2.0 if self.training else 0.5)
            self.is_scaled = not self.training
        return super().forward(x) * (2 if self.is_scaled else 1)


class Decays(nn.Linear):
    """Writes its weight in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_what_a_model_changes_once_in_a_mode_it_may_change() -> None:
    """Recording put the attribute back, and left the weight."""
    model, x = Scales(), torch.randn(4, 4)
    weight = model.first.weight.detach().clone()
    with pykern.Pipeline(model, devices="cpu:2", microbatches=2, sample=x[:2]) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(x[:2]), model(x[2:])]))
        pipe.eval()
        found = pipe(x)
        assert model.is_scaled
        assert torch.equal(model.first.weight, weight / 2)
        assert torch.equal(found, torch.cat([model(x[:2]), model(x[2:])]))
        pipe.train()
        pipe(x)
        assert torch.equal(model.first.weight, weight)
    model = Scales().eval()
    weight = model.first.weight.detach().clone()
    with pytest.raises(CutError, match=r"Scales\.is_scaled, .* call the model once before"):
        Traced(model, ((x,), {}), 2)
    assert torch.equal(model.first.weight, weight)
    assert not model.is_scaled


def test_a_recording_leaves_parameters_as_they_were() -> None:
    model, x = OfParts(), torch.randn(2, 4)
    model.second = Decays(4, 4)
    weight = model.second.weight.detach().clone()
    traced = Traced(model, ((x,), {}), 2)
    assert torch.equal(model.second.weight, weight)
    replay(traced, x)
    assert torch.equal(model.second.weight, weight / 2)


class Marks(OfParts):
    """Reads a mask that it has written into, as Longformer does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        marks = mask.float()
        marks[marks > 1] = 0.0
        return super().forward(x if marks.any().item() else -x)


def test_what_is_made_of_inputs_may_be_written_and_read() -> None:
    """It was said to be computed by the model."""
    model, x = Marks(), torch.randn(3, 4)
    traced = Traced(model, ((x, torch.ones(3, dtype=torch.int64)), {}), 3)
    for mask in map(torch.tensor, ([1, 1, 1], [0, 0, 0], [2, 2, 2], [1, 0, 1])):
        assert torch.equal(replay(traced, x, mask), model(x, mask))
    assert num_tapes(traced) == 2


class MarksView(OfParts):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        marks = mask.float()
        view = marks[:1]
        view.fill_(0.0)
        return super().forward(x if marks.any().item() else -x)


def test_what_is_written_by_another_name_is_not_read_again() -> None:
    model, x = MarksView(), torch.randn(3, 4)
    with pytest.raises(CutError, match="reads the values of a tensor"):
        Traced(model, ((x, torch.ones(3, dtype=torch.int64)), {}), 3)


class OfABuffer(OfParts):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_a_recording_counts_no_write_of_a_buffer_that_is_read() -> None:
    """A step that recorded took buffers that stages share for written, and was refused."""
    model, x = OfABuffer(), torch.randn(2, 4)
    version = model.scale._version
    traced = Traced(model, ((x,), {}), 2)
    replay(traced, x)
    assert model.scale._version == version


class Chosen(OfParts):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * len(mask[mask > 0].numpy()))


def test_arrays_that_are_read_may_have_other_lengths() -> None:
    """Arrays of equal numbers were taken for the same, and others raised an error of numpy."""
    model, x = Chosen(), torch.randn(3, 4)
    traced = Traced(model, ((x, torch.ones(3)), {}), 3)
    for mask in map(torch.tensor, ([1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [2.0, 1.0, 0.0])):
        assert torch.equal(replay(traced, x, mask), model(x, mask))
    assert num_tapes(traced) == 3


class ByStrides(OfParts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.is_contiguous() else -x)


@pytest.mark.parametrize("x", [torch.randn(3, 8)[:, ::2], torch.randn(4).expand(3, 4)])
def test_a_recording_sees_the_strides_of_inputs(x: Tensor) -> None:
    """It saw those of a copy, which was contiguous."""
    model = ByStrides()
    assert torch.equal(replay(Traced(model, ((x,), {}), 3), x), model(x))


class Highest(OfParts):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        highest = mask.max().item()
        return super().forward(x if math.isnan(highest) else x * sum(mask.tolist()))


def test_a_read_that_is_not_a_number_is_the_same_again() -> None:
    """Not-a-number equals nothing, so every batch with it was recorded."""
    model, x = Highest(), torch.randn(3, 4)
    traced = Traced(model, ((x, torch.ones(3)), {}), 3)
    for mask in map(torch.tensor, ([1.0, 1.0, 1.0], [1.0, float("nan"), 0.0])):
        for _ in range(2):
            assert torch.equal(replay(traced, x, mask), model(x, mask))
    assert num_tapes(traced) == 2

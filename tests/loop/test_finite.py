"""check_finite: the first tensor that is not finite is named, with its stage and microbatch."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.fake_cuda.fake import FakeCuda
from tests.loop.loops import WIDTH, assert_same, batch, mlp, pipeline, plain_loop_step, twins
from tests.support.pipelines import small
from tests.trace.models import Network

LEVELS = ["off", "loss", "grads", "activations"]


class Poison(nn.Module):
    """Gives back what it gets, with one value spoilt where the first row says so."""

    def __init__(self, value: float = torch.nan) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.value = value

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        spoilt = (torch.arange(WIDTH) == 3) & (x[0, 0] > 100)
        return {"y": torch.where(spoilt, self.value, y), "count": 3}


class Open(nn.Module):
    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["y"]


class SpoilBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


class BadBackward(nn.Module):
    """Right forward; where told to, its backward divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        y = self.linear(x)
        return SpoilBackward.apply(y) if len(self.calls) == 3 else y


def poisoned() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), Poison(), Open())


def batch_that_spoils(microbatch: int) -> tuple[Tensor, Tensor]:
    x, y = batch(6)
    x[2 * microbatch] = 1e4
    return x, y


# Its sign is kept by the layer in front of the poison.
def keep_sign(model: nn.Sequential) -> nn.Sequential:
    nn.init.eye_(model[1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[1].bias)  # type: ignore[arg-type]
    return model


def error_of(model: nn.Sequential, x: Tensor, y: Tensor, **options: Any) -> FloatingPointError:
    with (
        pipeline(model, **options) as pipe,
        pytest.raises(FloatingPointError) as caught,
    ):
        pipe.step(x, target=y)
    return caught.value


def test_an_activation_is_named_by_its_layer() -> None:
    error = error_of(keep_sign(poisoned()), *batch_that_spoils(1), check_finite="activations")
    assert str(error) == (
        "the output of layer '2'['y'] has 2 of 16 values that are NaN or infinite "
        "(stage 1, microbatch 1; float32 of shape (2, 8))"
    )
    assert "action 1F1, device 1" in error.__notes__[0]


@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
@pytest.mark.parametrize("level", ["loss", "grads", "activations"])
def test_a_loss_is_named_by_its_microbatch(level: str, recompute: Any) -> None:
    x, y = batch(6)
    y[4] = torch.inf
    error = error_of(mlp(), x, y, check_finite=level, recompute=recompute)
    assert str(error).startswith("the loss has 1 of 1 values")
    assert "the last stage, microbatch 2" in str(error)
    assert "stage 1, microbatch 2" in error.__notes__[0]


@pytest.mark.parametrize(
    ("schedule", "action"), [("one_f_one_b", "0B2"), ("zb_h1", "0W2"), ("gpipe", "0B2")]
)
def test_a_gradient_is_named_by_its_parameter(schedule: str, action: str) -> None:
    model = nn.Sequential(BadBackward(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    error = error_of(model, *batch(6), check_finite="grads", schedule=schedule)
    assert str(error).startswith("the gradient of '0.linear.weight' has 64 of 64 values")
    assert "(stage 0, microbatch 2; float32 of shape (8, 8))" in str(error)
    assert action in error.__notes__[0]


def test_the_batch_is_looked_at_too() -> None:
    x, y = batch(6)
    x[5, 1] = torch.nan
    error = error_of(mlp(), x, y, check_finite="activations")
    assert str(error).startswith("the batch[0] has 1 of 16 values")
    assert "stage 0, microbatch 2" in str(error)


def test_a_forward_is_looked_at_too() -> None:
    x, _ = batch(6)
    x[5, 1] = torch.nan
    with pipeline(mlp(), check_finite="activations") as pipe:
        with pytest.raises(FloatingPointError, match=r"batch.*stage 0, microbatch 2"):
            pipe(x)
        assert pipe(x[:3]).isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("schedule", ["interleaved", "zb_h1", "chimera"])
def test_steps_that_are_finite_are_as_without(level: Any, schedule: str) -> None:
    model, plain = twins(mlp(8))
    options = {"schedule": schedule, "microbatches": 4}
    with (
        pipeline(model, check_finite=level, **options) as pipe,
        pipeline(plain, **options) as reference,
    ):
        for _ in range(2):
            x, y = batch(8)
            loss = pipe.step(x, target=y)
            assert_same(pipe, plain, (loss, reference.step(x, target=y)))


def test_the_step_after_an_error_is_right() -> None:
    model, plain = twins(keep_sign(poisoned()))
    with pipeline(model, check_finite="activations") as pipe:
        x, y = batch_that_spoils(0)
        with pytest.raises(FloatingPointError):
            pipe.step(x, target=y)
        pipe.zero_grad()
        x, y = batch(6)
        loss = pipe.step(x, target=y)
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


def test_without_it_nothing_is_said() -> None:
    x, y = batch(6)
    y[4] = torch.inf
    with pipeline(mlp()) as pipe:
        assert pipe.step(x, target=y) == torch.inf


def test_gradients_are_left_to_a_scaler() -> None:
    model = nn.Sequential(BadBackward(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    scaler = torch.amp.GradScaler("cpu")
    weight = model.get_parameter("2.weight")
    before = weight.clone()
    with pipeline(model, check_finite="grads") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        x, y = batch(6)
        pipe.step(x, target=y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weight, before)


def test_gpus_and_replayed_graphs_tell_of_losses(gpus: FakeCuda) -> None:
    devices = ["cuda:0", "cuda:1"]
    options: dict[str, Any] = {"devices": devices, "capture": True, "check_finite": "loss"}
    x, y = batch(6)
    with pipeline(mlp(), **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        assert gpus.calls("cuGraphLaunch") > 0
        y[4] = torch.inf
        with pytest.raises(FloatingPointError, match="the last stage, microbatch 2"):
            pipe.step(x, target=y)


def test_gpus_tell_of_activations(gpus: FakeCuda) -> None:
    model = keep_sign(poisoned())
    x, y = batch_that_spoils(1)
    error = error_of(model, x, y, check_finite="activations", devices=["cuda:0", "cuda:1"])
    assert "layer '2'['y']" in str(error)


@pytest.mark.parametrize("level", ["grads", "activations"])
def test_what_no_graph_could_do_is_refused(gpus: FakeCuda, level: str) -> None:
    with pytest.raises(
        ValueError, match=f"check_finite must be 'off' or 'loss' with capture, got '{level}'"
    ):
        pipeline(mlp(), devices=["cuda:0", "cuda:1"], check_finite=level, capture=True)


def test_other_levels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of 'off', 'loss', .*, got 'all'"):
        pipeline(mlp(), check_finite="all")


def test_the_values_of_a_recorded_model_are_looked_at() -> None:
    model, tokens = Network(), torch.zeros(4, 5, dtype=torch.long)
    options: Any = dict(devices="cpu:2", microbatches=2, sample=tokens[:2])
    with pykern.Pipeline(
        model, loss_fn=lambda out: out["all"].sum(), check_finite="activations", **options
    ) as pipe:
        pipe.step(tokens)
        with torch.no_grad():
            model.get_parameter("blocks.1.up.bias")[0] = torch.nan
        with pytest.raises(FloatingPointError, match=r"layer 'blocks\.1'\[\d+\] has 80 of 80"):
            pipe.step(tokens)


class Causal(nn.Module):
    """Makes a mask with -inf, which goes past its layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.encoder(x, mask=mask, is_causal=True)


def test_masks_may_hold_minus_infinity() -> None:
    model, x = Causal(), torch.randn(4, 3, WIDTH)
    with small(model, sample=x[:2], check_finite="activations") as pipe:
        pipe.step(x, target=x)
        x[3, 0, 0] = -torch.inf
        with pytest.raises(FloatingPointError, match=r"layer 'encoder\.layers\.0'.*microbatch 1"):
            pipe.step(x, target=x)


@dataclass
class Pair:
    """A dataclass, which torch does not know as a tree."""

    first: Tensor
    second: Tensor


class Halves(nn.Linear):
    def forward(self, x: Tensor) -> Pair:  # type: ignore[override]
        y = super().forward(x)
        return Pair(y, y.log())


class Joined(nn.Linear):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.first + pair.second)


def test_the_field_of_a_dataclass_is_named_in_the_first_microbatch() -> None:
    layers = nn.Sequential(Halves(WIDTH, WIDTH), Joined(WIDTH, WIDTH))
    x, y = batch()
    with (
        pipeline(layers, check_finite="activations") as pipe,
        pytest.raises(FloatingPointError, match=r"layer '0'\.second has \d+ of .*microbatch 0"),
    ):
        pipe.step(x, target=y)

"""autocast, half precision, train and eval, no_grad and inference_mode: as in the plain loop."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.loop.loops import WIDTH, assert_same, batch, mlp, pipeline, plain_loop_step, twins

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_steps_within_autocast(dtype: torch.dtype, schedule: str) -> None:
    """The cache of cast weights is emptied by whoever leaves autocast, so it spans a step."""
    model, plain = twins(mlp(8))
    with pipeline(model, schedule=schedule) as pipe:
        for _ in range(3):
            x, y = batch()
            with torch.autocast("cpu", dtype):
                loss = pipe.step(x, target=y)
                expected = plain_loop_step(plain, x, y)
                assert pipe(x).dtype == dtype
            assert_same(pipe, plain, (loss, expected))
            assert pipe(x).dtype == torch.float32


def test_autocast_that_is_off_within_a_layer() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.linear(x.float())

    model, plain = twins(nn.Sequential(*mlp(2), Exact(), *mlp(2)))
    with pipeline(model) as pipe, torch.autocast("cpu", torch.bfloat16):
        x, y = batch()
        loss = pipe.step(x, target=y)
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


@pytest.mark.parametrize("recompute", [None, "stage"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_models_in_half_precision(dtype: torch.dtype, recompute: str | None) -> None:
    model, plain = twins(mlp(8).to(dtype))
    with pipeline(model, schedule="hanayo", recompute=recompute) as pipe:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, plain)]
        for _ in range(3):
            x, y = (tensor.to(dtype) for tensor in batch())
            loss = pipe.step(x, target=y)
            assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))
            assert loss.dtype == dtype
            for optimizer in optimizers:
                optimizer.step()


def test_master_weights_with_half_precision_layers() -> None:
    """Some layers in bfloat16, the others in float32, with casts between."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(self.dtype)

    layers = [Cast(torch.bfloat16), *mlp(4).bfloat16(), Cast(torch.float32), *mlp(2)]
    model, plain = twins(nn.Sequential(*layers))
    with pipeline(model) as pipe:
        x, y = batch()
        loss = pipe.step(x, target=y)
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


def dropped() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)]
    return nn.Sequential(*layers)


def test_train_and_eval_take_turns() -> None:
    """Evaluation leaves statistics and random numbers alone; training goes on as if it had not
    been."""
    model = dropped()
    without = copy.deepcopy(model)
    with pipeline(model) as pipe, pipeline(without) as reference:
        for number in range(4):
            x, y = batch(12)
            torch.manual_seed(number)
            loss = pipe.step(x, target=y)
            torch.manual_seed(number)
            assert_same(pipe, without, (loss, reference.step(x, target=y)))
            pipe.eval()
            state = torch.get_rng_state()
            output = pipe(x)
            assert torch.equal(torch.get_rng_state(), state)
            with torch.no_grad():
                expected = torch.cat([copy.deepcopy(without).eval()(part) for part in x.split(4)])
            assert torch.equal(output, expected)
            pipe.train()
        assert all(module.training for module in model.modules())


def test_a_step_in_eval_mode_trains_without_dropout() -> None:
    model, plain = twins(dropped().eval())
    with pipeline(model) as pipe:
        x, y = batch()
        loss = pipe.step(x, target=y)
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


def test_no_grad_and_inference_mode() -> None:
    model, plain = twins(mlp())
    x, y = batch(6)
    with pipeline(model) as pipe:
        expected = torch.cat([plain(part) for part in x.split(2)]).detach()
        with torch.no_grad():
            assert torch.equal(pipe(x), expected)
            with pytest.raises(RuntimeError, match="grad mode must be on in"):
                pipe.step(x, target=y)
        with torch.inference_mode():
            output = pipe(x)
            assert output.is_inference()
            assert torch.equal(output, expected)
            with pytest.raises(RuntimeError, match="grad mode must be on in"):
                pipe.step(x, target=y)
        assert pipe(x).requires_grad
        loss = pipe.step(x, target=y)
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


def test_what_trains_may_change_between_steps() -> None:
    model, plain = twins(mlp())
    with pipeline(model, schedule="zb_h1") as pipe:
        for frozen in ((), (0,), (0, 2), (2,), ()):
            for one in (model, plain):
                one.requires_grad_(True)
                one.zero_grad()
                for number in frozen:
                    one[number].requires_grad_(False)
            x, y = batch()
            loss = pipe.step(x, target=y)
            assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


class Mixed(nn.Module):
    """Operations that are of parts: autocast casts those of einsum, torch has others for GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.einsum("bi,ij->bj", x, self.weight)
        out: Tensor = self.cell(y[:, None].expand(-1, 3, -1))[0]
        return out[:, -1]


class Views(nn.Module):
    """Views of a parameter, by operations that are of parts and by others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, *_ = self.weight.flatten().reshape(2, -1).chunk(2, dim=1)
        seen = (self.weight[:1], self.weight.T[1:2], first.contiguous().view(-1)[:WIDTH])
        return x * sum(seen)


class Whole(nn.Module):
    """A model with a forward of its own, which is recorded."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("layer", [Mixed, Views])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_first_call_in_inference_mode_has_the_bits_of_the_model(
    is_recorded: bool, layer: Callable[[], nn.Module], cast: bool
) -> None:
    torch.manual_seed(0)
    model = Whole(layer) if is_recorded else nn.Sequential(layer(), layer())
    x = torch.randn(8, WIDTH)
    sample: dict[str, Any] = {"sample": x[:4]} if is_recorded else {}
    with (
        pykern.Pipeline(model, devices="cpu:2", microbatches=2, **sample) as pipe,
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
    ):
        expected = torch.cat([model(part) for part in x.chunk(2)])
        assert all(torch.equal(pipe(x), expected) for _ in range(3))

"""Gradients through `pipe(x)`: a loss outside, as of any module."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.outside.cases import (
    MICROBATCHES,
    WIDTH,
    assert_gradients,
    batch,
    mean_square,
    model,
    pipeline,
    plain,
    require_the_bits,
)

PLANS: dict[str, Callable[[], Plan]] = {
    "gpipe": lambda: schedules.gpipe(2, MICROBATCHES),
    "one_f_one_b": lambda: schedules.one_f_one_b(4, MICROBATCHES),
    "interleaved": lambda: schedules.interleaved(2, 4),
    "zb_h1": lambda: schedules.zb_h1(2, MICROBATCHES),
    "zb_v": lambda: schedules.zb_v(2, 4),
    "hanayo": lambda: schedules.hanayo(2, 4),
}


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_the_plain_models(name: str, recompute: Any) -> None:
    layers, plan = model(), PLANS[name]()
    with pipeline(layers, plan, recompute=recompute) as pipe:
        require_the_bits(pipe, layers)


def test_the_graph_goes_on_on_both_sides() -> None:
    layers, first, last = model(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    reference = copy.deepcopy(nn.Sequential(first, layers, last))
    with pipeline(layers) as pipe:
        outer = nn.Sequential(first, pipe, last)
        mean_square(outer(batch())).backward()
        mean_square(reference(batch())).backward()
        for mine, theirs in zip(outer.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad)


class Structured(nn.Module):
    """Any structure, of which a loss may leave out a part."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        left = self.left(x)
        return {"left": left, "both": (left, self.right(x)), "rows": x.argmax(1), "name": "any"}


def test_outputs_of_any_structure_and_those_that_are_left_out() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Structured())
    reference = copy.deepcopy(layers)
    with pipeline(layers) as pipe:
        found, expected = pipe(batch()), reference(batch())
        assert found["name"] == "any"
        assert not found["rows"].requires_grad
        assert torch.equal(found["rows"], expected["rows"])
        (found["left"].sum() + found["both"][0].square().sum()).backward()
        (expected["left"].sum() + expected["both"][0].square().sum()).backward()
        assert layers[1].right.weight.grad is None  # type: ignore[union-attr]
        torch.testing.assert_close(layers[0].weight.grad, reference[0].weight.grad)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * scale + shift
        return out


def test_gradients_reach_arguments_by_name_and_numbers() -> None:
    layers = nn.Sequential(Named(), Named())
    scale, shift = batch(7).abs().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    with pipeline(layers) as pipe:
        found = torch.autograd.grad(
            pipe(batch(), scale=scale, shift=shift).sum(),
            [scale, shift, layers.get_parameter("0.linear.bias")],
        )
    y = layers[1](layers[0](batch(), scale=scale, shift=shift), scale=scale, shift=shift)
    expected = torch.autograd.grad(y.sum(), [scale, shift, layers.get_parameter("0.linear.bias")])
    torch.testing.assert_close(found, expected)


def test_grad_leaves_the_gradients_of_parameters_alone() -> None:
    layers = model()
    with pipeline(layers) as pipe:
        x = batch().requires_grad_()
        (found,) = torch.autograd.grad(mean_square(pipe(x)), [x])
        assert all(parameter.grad is None for parameter in layers.parameters())
        mean_square(layers(x)).backward()
        torch.testing.assert_close(found, x.grad)


def test_several_calls_before_one_backward() -> None:
    layers = model()
    reference = copy.deepcopy(layers)
    with pipeline(layers) as pipe:
        (mean_square(pipe(batch(5))) + mean_square(pipe(batch(7)))).backward()
        (mean_square(reference(batch(5))) + mean_square(reference(batch(7)))).backward()
        for mine, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_steps_and_forwards_may_come_between_a_call_and_its_backward() -> None:
    layers = model()
    reference = copy.deepcopy(layers)
    with pipeline(layers, loss_fn=mean_square, recompute="stage") as pipe:
        y = pipe(batch())
        pipe.step(batch(4))
        pipe.zero_grad()
        with torch.no_grad():
            pipe(batch(2))
        list(pipe.stream([batch(3)] * 4))
        mean_square(y).backward()
        plain(reference, batch(), MICROBATCHES, mean_square)
        assert_gradients(layers, reference)


def test_hooks_of_a_parameter_see_its_gradient_once_and_complete() -> None:
    layers = model()
    weight = layers[0][0].weight  # type: ignore[index]
    seen: list[Tensor] = []
    after: list[Tensor] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    weight.register_hook(double)
    weight.register_post_accumulate_grad_hook(lambda one: after.append(one.grad.clone()))
    with pipeline(layers) as pipe:
        mean_square(pipe(batch())).backward()
    assert len(seen) == len(after) == 1
    assert torch.equal(seen[0] * 2, weight.grad)
    assert torch.equal(after[0], weight.grad)


def test_nothing_is_left_when_no_backward_comes() -> None:
    made: list[weakref.ref[Tensor]] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).tanh()
            made.append(weakref.ref(out))
            return out

    with pipeline(nn.Sequential(Noting(WIDTH, WIDTH), Noting(WIDTH, WIDTH))) as pipe:
        gc.disable()
        try:
            y = pipe(batch())
            assert any(one() is not None for one in made)
            del y
            assert all(one() is None for one in made)
            made.clear()
            y = pipe(batch())
            y.sum().backward()
            assert all(one() is None for one in made)
        finally:
            gc.enable()


def test_a_backward_lets_go_microbatch_by_microbatch() -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(lambda _: alive.append(sum(one() is not None for one in made)))
            out = out.tanh()
            made.append(weakref.ref(out))
            return out

    with pipeline(nn.Sequential(Noting(WIDTH, WIDTH)), schedules.gpipe(1, 4)) as pipe:
        y = pipe(batch(8))
        y.sum().backward()
    assert alive == [4, 3, 2, 1]


def test_without_gradients_there_is_no_graph() -> None:
    layers = model()
    with pipeline(layers) as pipe:
        with torch.no_grad():
            assert not pipe(batch()).requires_grad
        with torch.inference_mode():
            assert pipe(batch()).is_inference()
        layers.requires_grad_(False)
        assert not pipe(batch()).requires_grad
        x = batch().requires_grad_()
        pipe(x).sum().backward()
        assert x.grad is not None


def test_what_does_not_train_gets_no_gradient_and_holds_none_back() -> None:
    layers = model()
    layers[:2].requires_grad_(False)
    reference = copy.deepcopy(layers)
    with pipeline(layers) as pipe:
        mean_square(pipe(batch())).backward()
    mean_square(reference(batch())).backward()
    for mine, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)


def test_training_may_be_turned_off_between_a_call_and_its_backward() -> None:
    layers = model()
    with pipeline(layers) as pipe:
        y = pipe(batch())
        layers.requires_grad_(False)
        y.sum().backward()
        # As in torch, which looks when a gradient comes.
        assert all(parameter.grad is None for parameter in layers.parameters())


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_parameters_that_stages_share(recompute: Any) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers[2].weight = layers[0].weight
    both = nn.Sequential(*layers, layers[0])
    reference = copy.deepcopy(both)
    options: dict[str, Any] = {"devices": "cpu:2", "microbatches": 3, "split_at": ["2"]}
    with pykern.Pipeline(both, recompute=recompute, **options) as pipe:
        mean_square(pipe(batch())).backward()
        mean_square(reference(batch())).backward()
        for mine, theirs in zip(both.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        assert pipe(batch()).requires_grad


def test_parameters_are_themselves_after_every_call() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH), Last())
    lstm = layers[1]
    before = [*layers.parameters()], lstm._flat_weights
    with pipeline(layers) as pipe:
        pipe(batch()).sum().backward()
        assert all(a is b for a, b in zip(before[0], layers.parameters(), strict=True))
        assert lstm._flat_weights is before[1]
        assert all(parameter.grad is not None for parameter in layers.parameters())


class Last(nn.Module):
    def forward(self, found: Any) -> Tensor:
        output: Tensor = found[0]
        return output


class Apart(nn.Module):
    """Keeps its parameter in attributes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pair = (self.linear.weight, self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.pair)


def test_parameters_in_attributes_are_found() -> None:
    layers = nn.Sequential(Apart(), Apart())
    with pipeline(layers) as pipe:
        x = batch().requires_grad_()
        torch.autograd.grad(pipe(x).sum(), [x])
        assert layers.get_parameter("0.linear.weight").grad is None


def test_random_numbers_are_those_of_a_step() -> None:
    layers = nn.Sequential(*(nn.Sequential(one, nn.Dropout(0.4)) for one in model()))
    with pipeline(layers, loss_fn=torch.sum, reduction="sum", recompute="stage") as pipe:
        torch.manual_seed(3)
        loss = pipe.step(batch())
        expected = [parameter.grad for parameter in layers.parameters()]
        state = torch.get_rng_state()
        pipe.zero_grad()
        torch.manual_seed(3)
        found = pipe(batch()).sum()
        torch.rand(5)
        found.backward()
        assert torch.allclose(found, loss)
        for parameter, gradient in zip(layers.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
        torch.manual_seed(3)
        pipe(batch())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_recompute_runs_under_the_autocast_of_the_forward(recompute: Any) -> None:
    layers = model()
    with pipeline(layers, recompute=recompute) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            y = pipe(batch())
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        assert not torch.is_autocast_enabled("cpu")
        found = [parameter.grad for parameter in layers.parameters()]
        layers.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = layers(batch())
        y.float().square().mean().backward()
        for parameter, gradient in zip(layers.parameters(), found, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_from_outside(reentrant: bool) -> None:
    layers = model()
    reference = copy.deepcopy(layers)
    with pipeline(layers) as pipe:
        x = batch().requires_grad_()
        y = checkpoint(pipe, x, use_reentrant=reentrant)
        mean_square(y).backward()
        plain(reference, batch(), MICROBATCHES, mean_square)
        assert_gradients(layers, reference)


class Fails(Exception):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ctx.error


def test_an_exception_of_a_backward_arrives_as_it_is() -> None:
    error: Fails | None = Fails("here")

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if error is None else Failing.apply(out, error)

    layers = nn.Sequential(Layer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pipeline(layers) as pipe:
        y = pipe(batch())
        with pytest.raises(Fails) as caught:
            y.sum().backward()
        assert caught.value is error
        assert error.__notes__ == ["pykern: raised in stage 0, microbatch 0, action 0B0, device 0"]
        assert all(parameter.grad is None for parameter in layers.parameters())
        error = None
        pipe(batch()).sum().backward()
        assert all(parameter.grad is not None for parameter in layers.parameters())


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_within_a_module_that_is_compiled() -> None:
    layers = model()
    reference = copy.deepcopy(layers)
    with pipeline(layers) as pipe:
        outer = torch.compile(nn.Sequential(nn.Tanh(), pipe), backend="eager")
        for _ in range(2):
            mean_square(outer(batch())).backward()
            plain(reference, batch().tanh(), MICROBATCHES, mean_square)
        assert_gradients(layers, reference)

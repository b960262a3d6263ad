import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from pykern.kernels.activation_linear import gated_linear, gelu_linear
from pykern.kernels.levels import LEVELS, KernelLevel, keeping
from tests.runtime.split_cases import Make, assert_parts_are_whole

WIDTH, OUT = 128, 24


def gated(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return gated_linear(x, weight, bias)


def tanh_gated(weight: Tensor, x: Tensor) -> Tensor:
    return gated_linear(x, weight, activation="geglu")


def gelu(input_bias: Tensor, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return gelu_linear(x, input_bias, weight, bias)


def tanh_gelu(weight: Tensor, x: Tensor) -> Tensor:
    return gelu_linear(x, None, weight, approximate="tanh")


def plain_gated(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.linear(F.silu(gate) * up, weight, bias)


def plain_tanh_gated(weight: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.linear(F.gelu(gate, approximate="tanh") * up, weight)


def plain_gelu(input_bias: Tensor, weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.gelu(x + input_bias), weight, bias)


def plain_tanh_gelu(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(F.gelu(x, approximate="tanh"), weight)


Function = Callable[..., Tensor]
# Ours, the same in plain torch, columns of x, parameters.
CASES: dict[str, tuple[Function, Function, int, tuple[tuple[int, ...], ...]]] = {
    "swiglu": (gated, plain_gated, 2 * WIDTH, ((OUT, WIDTH), (OUT,))),
    "geglu": (tanh_gated, plain_tanh_gated, 2 * WIDTH, ((OUT, WIDTH),)),
    "gelu": (gelu, plain_gelu, WIDTH, ((WIDTH,), (OUT, WIDTH), (OUT,))),
    "gelu_tanh": (tanh_gelu, plain_tanh_gelu, WIDTH, ((OUT, WIDTH),)),
}


def gradients(
    name: str, level: KernelLevel, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the function here and of plain torch."""
    ours, plain, columns, shapes = CASES[name]
    torch.manual_seed(7)
    values = [torch.randn(shape, dtype=dtype) for shape in (*shapes, (3, 5, columns))]
    gradient = torch.randn(3, 5, OUT, dtype=dtype)
    found = []
    for function in (ours, plain):
        arguments = [value.clone().requires_grad_() for value in values]
        with keeping(level):
            output = function(*arguments)
        found.append([output.detach(), *torch.autograd.grad(output, arguments, gradient)])
    return found[0], found[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["none", "ops"])
def test_in_float64_it_is_plain_torch(name, level):
    ours, plain = gradients(name, level, torch.float64)
    for found, expected in zip(ours, plain, strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_change_bits_of_gradients_only_where_they_say_so(name, dtype):
    everything, least, eight_bits = (gradients(name, level, dtype)[0] for level in LEVELS)
    assert all(torch.equal(a, b) for a, b in zip(everything, least, strict=True))
    assert torch.equal(eight_bits[0], least[0])
    again = gradients(name, "ops+stash", dtype)[0]
    for ours, same, expected in zip(eight_bits[1:], again[1:], least[1:], strict=True):
        assert torch.equal(ours, same)
        off = ((ours - expected).double().norm() / expected.double().norm()).item()
        assert off < 0.015
    # The gradient of x is off; that of the last bias, where there is one, does not depend on it.
    assert not torch.equal(eight_bits[-1], least[-1])


def bytes_kept(name: str, level: KernelLevel) -> float:
    """By the backward, of one row in bfloat16, parameters aside."""
    function, _, columns, shapes = CASES[name]
    parameters = [torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in shapes]
    ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(10, columns, dtype=torch.bfloat16).requires_grad_()
    with saved_tensors_hooks(keep, lambda tensor: tensor), keeping(level):
        function(*parameters, x)
    return sum(kept.values()) / 10


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept(name):
    inputs = CASES[name][2]
    assert bytes_kept(name, "none") == 2 * inputs + 2 * WIDTH
    assert bytes_kept(name, "ops") == 2 * inputs
    assert bytes_kept(name, "ops+stash") == inputs + 4 * inputs / 128


@pytest.mark.parametrize("name", CASES)
def test_only_eight_bits_stay_alive(name):
    function, _, columns, shapes = CASES[name]
    first = nn.Linear(6, columns)
    parameters = [torch.randn(shape).requires_grad_() for shape in shapes]
    x = first(torch.randn(2, 6))
    alive = weakref.ref(x)
    with keeping("ops+stash"):
        output = function(*parameters, x)
    del x
    assert alive() is None
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in [*parameters, *first.parameters()])


def test_no_eight_bits_are_made_without_a_backward(monkeypatch):
    def quantise(_: Tensor) -> None:
        raise AssertionError("something is quantised")

    monkeypatch.setattr("pykern.kernels.stash.quantise", quantise)
    with torch.no_grad(), keeping("ops+stash"):
        gated_linear(torch.ones(2, 6), torch.ones(4, 3))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", LEVELS)
def test_i_and_w_together_are_b(name, level):
    function, _, columns, shapes = CASES[name]

    def both(inner: Tensor, outer: Tensor, *rest: Tensor) -> Tensor:
        *parameters, x = rest
        with keeping(level):
            return function(*parameters, torch.tanh(x @ inner)) @ outer

    layer = Make(both, (8, columns), (OUT, 8), *shapes)
    other = Make(both, (8, columns), (OUT, 8), *shapes)
    other.load_state_dict(layer.state_dict())
    assert_parts_are_whole(layer, other, torch.randn(5, 8))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact(name):
    function, _, columns, shapes = CASES[name]
    small = [tuple(min(size, 3) for size in shape) for shape in shapes]
    columns = 3 * columns // WIDTH
    arguments = [
        torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in (*small, (2, columns))
    ]
    assert gradcheck(function, arguments)


@pytest.mark.parametrize("name", CASES)
def test_a_backward_may_run_again(name):
    function, _, columns, shapes = CASES[name]
    arguments = [torch.randn(shape).requires_grad_() for shape in (*shapes, (2, columns))]
    output = function(*arguments)
    first = torch.autograd.grad(output, arguments, torch.ones(2, OUT), retain_graph=True)
    second = torch.autograd.grad(output, arguments, torch.ones(2, OUT))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), ()])
def test_rows_of_any_number(shape):
    for function, plain, columns, shapes in CASES.values():
        arguments = [torch.randn(s).requires_grad_() for s in (*shapes, (*shape, columns))]
        output, expected = function(*arguments), plain(*arguments)
        assert torch.allclose(output, expected, atol=1e-4)
        ours = torch.autograd.grad(output.sum(), arguments)
        for found, other in zip(ours, torch.autograd.grad(expected.sum(), arguments), strict=True):
            assert found.shape == other.shape
            assert torch.allclose(found, other, atol=1e-4)


def test_frozen_weights_get_no_gradients_and_cost_nothing():
    x, weight = torch.randn(3, 8).requires_grad_(), torch.randn(2, 4)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), keeping("none"):
        output = gated_linear(x, weight)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
    output.sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_autocast_casts_what_a_linear_layer_casts():
    x = torch.randn(6, 8).requires_grad_()
    weight, bias = torch.randn(3, 4).requires_grad_(), torch.randn(3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = gated(weight, bias, x), plain_gated(weight, bias, x)
        wide = gated(weight.double(), bias.double(), x.double())
    assert ours.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    assert torch.equal(ours, plain)
    gradient = torch.randn(6, 3).bfloat16()
    found = torch.autograd.grad(ours, (x, weight, bias), gradient)
    expected = torch.autograd.grad(plain, (x, weight, bias), gradient)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2)


def test_wrong_arguments_are_refused():
    x, weight = torch.ones(2, 8), torch.ones(3, 4)
    with pytest.raises(ValueError, match="one of swiglu, geglu, got 'relu'"):
        gated_linear(x, weight, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of none, tanh, got 'exact'"):
        gelu_linear(x, None, weight, approximate="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[outputs, 8\], .* got \[3, 4\]"):
        gelu_linear(x, None, weight)
    with pytest.raises(ValueError, match=r"\[outputs, 4\], .* got \[4\]"):
        gated_linear(x, weight[0])
    with pytest.raises(ValueError, match=r"bias must have shape .*, as weight says, got \[4\]"):
        gated_linear(x, weight, torch.ones(4))
    with pytest.raises(ValueError, match="even number"):
        gated_linear(x[:, :7], weight)
    with pytest.raises(ValueError, match="weight and bias must be on cpu as x is, got meta"):
        gated_linear(x, weight.to("meta"))
    with pytest.raises(TypeError, match=r"must be torch.float32 as x is, got torch.float64"):
        gated_linear(x, weight.double())

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pykern.kernels.dropout import dropout
from pykern.kernels.levels import KernelLevel, keeping
from pykern.kernels.norm import NormKind
from pykern.kernels.norm_linear import norm_linear
from tests.kernels.acceptance import assert_backward_repeats
from tests.runtime import split_cases

EPS = 1e-5
KINDS = ["rms", "layer"]
WIDTH, OUTPUTS = 8, 12


def parameters(kind: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Weight and bias of the norm, then of the linear layer."""
    torch.manual_seed(3)
    shapes = [(WIDTH,), (WIDTH,), (OUTPUTS, WIDTH), (OUTPUTS,)]
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    return [None if kind == "rms" and i == 1 else tensor for i, tensor in enumerate(tensors)]


def unfused(*tensors, kind, rate=0.0):
    """The same by torch's own operations."""
    x, delta, norm_weight, norm_bias, weight, bias = tensors
    total = x if delta is None else x + dropout(delta, rate)
    if kind == "rms":
        normed = F.rms_norm(total, norm_weight.shape, norm_weight, EPS)
    else:
        normed = F.layer_norm(total, norm_weight.shape, norm_weight, norm_bias, EPS)
    return total, F.linear(normed, weight, bias)


def leaves(dtype: torch.dtype = torch.float32) -> list[Any]:
    torch.manual_seed(4)
    return [torch.randn(2, 3, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2)]


def run(function, tensors, state, **options):
    """Results, and gradients of all tensors that are there."""
    torch.set_rng_state(state)
    total, output = function(*tensors, **options)
    there = [tensor for tensor in tensors if tensor is not None]
    loss = (total.sin() * 0.7).sum() + output.float().cos().sum()
    return [total, output, *torch.autograd.grad(loss, there)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("has_delta", [False, True])
def test_it_is_the_norm_and_the_linear_layer(kind, rate, has_delta):
    x, delta = leaves()
    tensors = [x, delta if has_delta else None, *parameters(kind)]
    state = torch.get_rng_state()
    ours = run(norm_linear, tensors, state, kind=kind, eps=EPS, rate=rate)
    theirs = run(unfused, tensors, state, kind=kind, rate=rate)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact(kind):
    tensors = [*leaves(torch.float64), *parameters(kind, torch.float64)]
    there = [i for i, tensor in enumerate(tensors) if tensor is not None]
    state = torch.get_rng_state()

    def function(*given):
        torch.set_rng_state(state)
        arguments: list[Any] = [None] * len(tensors)
        for position, tensor in zip(there, given, strict=True):
            arguments[position] = tensor
        return norm_linear(*arguments, kind=kind, eps=EPS, rate=0.4)

    assert torch.autograd.gradcheck(function, [tensors[i] for i in there], fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_give_the_same_bits(kind, dtype):
    tensors = [*leaves(dtype), *parameters(kind, dtype)]
    state, results = torch.get_rng_state(), []
    for level in ("none", "ops", "ops+stash"):
        with keeping(level):
            results.append(run(norm_linear, tensors, state, kind=kind, eps=EPS, rate=0.4))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def bytes_kept(kind: NormKind, has_delta: bool, level: KernelLevel) -> tuple[int, bool]:
    """The bytes kept for a token, parameters aside, and whether the sum is among them."""
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, delta = leaves(torch.bfloat16)
    tensors = parameters(kind, torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), keeping(level):
        total, _ = norm_linear(
            x, delta if has_delta else None, *tensors, kind=kind, eps=EPS, rate=0.5
        )
    for parameter in tensors:
        if parameter is not None:
            saved.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(saved.values()) // 6, total.untyped_storage().data_ptr() in saved


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_delta", [False, True])
def test_bytes_kept(kind, has_delta):
    of_row = 8 if kind == "layer" else 4
    assert bytes_kept(kind, has_delta, "ops") == (2 * WIDTH + of_row, True)
    assert bytes_kept(kind, has_delta, "none") == (4 * WIDTH + of_row, True)


def test_without_a_delta_the_sum_is_x():
    x, _ = leaves()
    total, _ = norm_linear(x, None, *parameters("rms"), kind="rms", eps=EPS, rate=0.5)
    assert total.data_ptr() == x.data_ptr()
    assert torch.equal(total, x)


@pytest.mark.parametrize("has_delta", [False, True])
def test_only_one_result_may_be_used(has_delta):
    x, delta = leaves()
    tensors = [x, delta if has_delta else None, *parameters("layer")]
    total, output = norm_linear(*tensors, kind="layer", eps=EPS)
    wanted = [x, *tensors[2:]]
    of_x, *of_others = torch.autograd.grad(total.sum(), wanted, retain_graph=True)
    assert torch.equal(of_x, torch.ones_like(x))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in of_others)
    alone = torch.autograd.grad(output.sum(), wanted)
    _, expected = unfused(*tensors, kind="layer")
    for a, b in zip(alone, torch.autograd.grad(expected.sum(), wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_a_linear_layer(kind, dtype):
    tensors = [*leaves(), *parameters(kind)]
    state = torch.get_rng_state()
    results = []
    for function in (partial(norm_linear, eps=EPS), unfused):
        with torch.autocast("cpu", dtype=dtype):
            torch.set_rng_state(state)
            total, output = function(*tensors, kind=kind, rate=0.4)
        there = [tensor for tensor in tensors if tensor is not None]
        loss = total.sum() + output.sin().sum()
        results.append([total, output, *torch.autograd.grad(loss, there)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert results[0][1].dtype == dtype


def test_autocast_leaves_float64():
    tensors = [*leaves(torch.float64), *parameters("rms", torch.float64)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, output = norm_linear(*tensors, kind="rms", eps=EPS)
    assert output.dtype == torch.float64


@pytest.mark.parametrize("frozen", [[2], [4], [5], [2, 3, 4, 5]])
@pytest.mark.parametrize("level", ["none", "ops"])
def test_frozen_parameters_have_no_gradients(frozen, level):
    free, some = ([*leaves(), *parameters("layer")] for _ in range(2))
    for position in frozen:
        some[position].requires_grad_(False)
    for tensors in (free, some):
        with keeping(level):
            total, output = norm_linear(*tensors, kind="layer", eps=EPS)
        (total.sum() + output.sin().sum()).backward()
    for position, (a, b) in enumerate(zip(free, some, strict=True)):
        assert (b.grad is None) if position in frozen else torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("shape", [(0, WIDTH), (1, WIDTH), (WIDTH,)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(kind, shape):
    x, delta = (torch.randn(shape, requires_grad=True) for _ in range(2))
    tensors = [x, delta, *parameters(kind)]
    state = torch.get_rng_state()
    ours = run(norm_linear, tensors, state, kind=kind, eps=EPS)
    for a, b in zip(ours, run(unfused, tensors, state, kind=kind), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("level", ["none", "ops"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_equal_the_whole(kind, level):
    def function(norm_weight, norm_bias, weight, bias, x):
        norm_bias = norm_bias if kind == "layer" else None
        arguments = (norm_weight, norm_bias, weight, bias)
        total, output = norm_linear(x, None, *arguments, kind=kind, eps=EPS)
        total, output = norm_linear(total, output, *arguments, kind=kind, eps=EPS)
        return total.sin() + output

    def layer():
        torch.manual_seed(5)
        row, square = (WIDTH,), (WIDTH, WIDTH)
        return split_cases.Make(function, row, row, square, row)

    with keeping(level):
        split_cases.assert_parts_are_whole(layer(), layer(), torch.randn(5, split_cases.WIDTH))


def test_a_second_backward_gives_the_same():
    tensors = [*leaves(), *parameters("layer")]
    results = norm_linear(*tensors, kind="layer", eps=EPS, rate=0.4)
    assert_backward_repeats(results, tensors)


X, ROW, SQUARE = torch.ones(2, 4), torch.ones(4), torch.ones(4, 4)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (SQUARE[:, :3], None, r"weight .* \(outputs, 4\), got \(4, 3\)"),
        (SQUARE[:0], None, r"got \(0, 4\)"),
        (ROW, None, r"got \(4,\)"),
        (SQUARE, ROW[:3], r"bias .* \(4,\), got \(3,\)"),
        (
            SQUARE.half(),
            None,
            "weight of a linear layer must be torch.float32 as x is, got .*float16",
        ),
        (
            SQUARE,
            ROW.long(),
            "bias of a linear layer must be torch.float32 as x is, got torch.int64",
        ),
        (SQUARE.to("meta"), None, "weight of a linear layer must be on cpu as x is, got meta"),
    ],
)
def test_what_is_no_linear_layer_is_refused(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        norm_linear(X, None, ROW, None, weight, bias, kind="rms", eps=EPS)

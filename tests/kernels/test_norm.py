from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pykern.kernels import norm_operation as twin
from pykern.kernels.gpu import norm_operation as gpu
from pykern.kernels.norm import add_norm, layer_norm, rms_norm
from tests.kernels.acceptance import (
    Canaries,
    assert_accepted,
    assert_backward_repeats,
    uninitialised_is_nan,
)
from tests.kernels.norm_cases import CASES, EPS, SEED, TYPES, Case, Exact, exact_sum
from tests.kernels.sm90 import compiled_for_sm90
from tests.runtime import split_cases
from tests.support import programs


def assert_all_accepted(op: Any, case: Case) -> None:
    """Forward and backward of an implementation, and that it makes the normed output again."""
    x, delta, weight, bias, gradient, residual = case.tensors()
    dtype = case.normed_type
    added, normed, rstd, mean = op.add_and_normalise(
        x, delta, weight, bias, EPS, case.centred, dtype, case.rate, SEED, None
    )
    if delta is None:
        assert added.shape == (0,)
        added = x
    else:
        assert_accepted(added, *exact_sum(x, delta, case.rate))
    exact = Exact(added, weight, bias, case.centred)
    assert normed.dtype == dtype
    assert_accepted(normed, *exact.normed(), factor=10)
    assert rstd.dtype == torch.float32
    assert rstd.shape == (*x.shape[:-1], 1)
    torch.testing.assert_close(rstd.double(), exact.rstd, rtol=1e-5, atol=0)
    assert mean.shape == (rstd.shape if case.centred else (0,))
    for again in (True, False):
        of_total, made, of_weights = op.gradients(
            gradient, residual, added, weight, bias, rstd, mean, EPS, case.centred, again
        )
        assert torch.equal(made, normed) if again else made.shape == (0,)
        assert of_total.dtype == x.dtype
        assert_accepted(of_total, *exact.of_total(gradient, residual), factor=20)
        assert of_weights.dtype == torch.float32
        assert_accepted(of_weights, *exact.of_weights(gradient), factor=20)


@settings(max_examples=40)
@given(CASES)
def test_twin_is_accepted(case):
    assert_all_accepted(twin, case)


@settings(max_examples=60)
@given(CASES, st.sampled_from([16, 8192]), st.sampled_from([64, 2048]), st.sampled_from([2, 256]))
def test_kernel_is_accepted(case, most_columns, elements, most_parts):
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(gpu, "_MOST_COLUMNS", most_columns)
        patch.setattr(gpu, "_MOST_BACKWARD", most_columns)
        patch.setattr(gpu, "_ELEMENTS", elements)
        patch.setattr(gpu, "_MOST_PARTS", most_parts)
        patch.setattr(gpu, "_PARTS", 4)
        patch.setattr(torch, "empty", canaries.empty)
        assert_all_accepted(gpu, case)
    canaries.check()


def test_seeds_may_be_in_memory():
    x, delta, weight = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    arguments = (x, delta, weight, None, EPS, False, torch.float32, 0.4)
    for op in (twin, gpu):
        expected = op.add_and_normalise(*arguments, SEED, None)
        for a, b in zip(
            op.add_and_normalise(*arguments, 0, torch.tensor([SEED])), expected, strict=True
        ):
            assert torch.equal(a, b)


FAR = """
import torch
from pykern.kernels.gpu import norm_operation as norm

# Memory that nothing is written to is not there.
room = torch.empty(2 * (2**31 + 100), dtype=torch.uint8).view(torch.float16)

def far(offset, values):
    return room.as_strided((3, 5), (2**30, 1), offset).copy_(values)

values = torch.randn(4, 3, 5).half()
weight, bias = torch.randn(5), torch.randn(5)

def run(x, delta, gradient, residual):
    results = norm.add_and_normalise(x, delta, weight, bias, 1e-5, True, x.dtype, 0.0, 0, None)
    others = norm.gradients(gradient, residual, x, weight, bias, *results[2:], 1e-5, True, True)
    return [*results, *others]

for columns in (8192, 4):
    norm._MOST_COLUMNS = norm._MOST_BACKWARD = columns
    ours = run(*(far(8 * i, rows) for i, rows in enumerate(values)))
    for a, b in zip(ours, run(*values)):
        assert torch.equal(a, b)
"""


def test_rows_may_be_far_apart():
    done = programs.run(FAR)
    assert done.returncode == 0, done.stderr


def norms(x: Tensor, weight: Tensor, bias: Tensor) -> list[tuple[Tensor, Tensor]]:
    row = x.shape[-1:]
    return [
        (rms_norm(x, weight, EPS), F.rms_norm(x, row, weight, EPS)),
        (layer_norm(x, weight, None, EPS), F.layer_norm(x, row, weight, None, EPS)),
        (layer_norm(x, weight, bias, EPS), F.layer_norm(x, row, weight, bias, EPS)),
    ]


@pytest.mark.parametrize("dtype", TYPES)
def test_errors_are_at_most_twice_those_of_torch(dtype):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((20, 300), (300,), (300,)))
    exact = norms(x.double(), weight.double(), bias.double())
    for (ours, theirs), (_, expected) in zip(norms(x, weight, bias), exact, strict=True):
        errors = [(result.double() - expected).abs().max() for result in (ours, theirs)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradients_are_exact(kind, rate):
    x, delta = (torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rows = (weight, bias) if kind == "layer" else (weight,)
    state = torch.get_rng_state()

    def of_sum(x, delta, *rows):
        torch.set_rng_state(state)
        return add_norm(x, delta, *rows, kind=kind, eps=EPS, rate=rate)

    def alone(x, *rows):
        return rms_norm(x, *rows) if kind == "rms" else layer_norm(x, *rows)

    assert torch.autograd.gradcheck(of_sum, (x, delta, *rows))
    assert torch.autograd.gradcheck(alone, (x, *rows))


def test_only_one_result_may_be_used():
    x, delta, weight = (torch.randn(shape, requires_grad=True) for shape in ((3, 4), (3, 4), (4,)))
    total, normed = add_norm(x, delta, weight, kind="rms", eps=EPS)
    of_x, of_weight = torch.autograd.grad(total.sum(), (x, weight), retain_graph=True)
    assert torch.equal(of_x, torch.ones(3, 4))
    assert torch.equal(of_weight, torch.zeros(4))
    (of_delta,) = torch.autograd.grad((normed * delta).sum(), delta)
    assert of_delta.abs().max() > 0


def test_a_backward_changes_nothing_and_may_come_again():
    x, delta = (torch.randn(6, 8, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, requires_grad=True)
    results = add_norm(x, delta, weight, kind="rms", eps=EPS, rate=0.5)
    assert_backward_repeats(results, (x, delta, weight))


def test_a_backward_cannot_be_differentiated():
    """torch refuses the first of these alone; of the second it left the norm's part out."""
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(3)
    for loss in (rms_norm(x, weight).square().sum(), rms_norm(x, weight).sum()):
        with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_types_of_gradients_are_those_of_arguments():
    x = torch.randn(4, 8, requires_grad=True)
    delta = torch.randn(4, 8).bfloat16().requires_grad_()
    weight, bias = (torch.randn(8).half().requires_grad_() for _ in range(2))
    total, normed = add_norm(x, delta, weight, bias, kind="layer", eps=EPS)
    assert total.dtype == normed.dtype == torch.float32
    normed.sum().backward()
    for tensor in (x, delta, weight, bias):
        assert tensor.grad is not None
        assert tensor.grad.dtype == tensor.dtype


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_two_parts_equal_the_whole(kind):
    def function(weight, bias, x):
        bias = bias if kind == "layer" else None
        total, normed = add_norm(x.sin(), x, weight, bias, kind=kind, eps=EPS)
        return total + rms_norm(normed, weight)

    def layer():
        torch.manual_seed(5)
        return split_cases.Make(function, split_cases.ROW, split_cases.ROW)

    split_cases.assert_parts_are_whole(layer(), layer(), torch.randn(5, split_cases.WIDTH))


@pytest.mark.parametrize(("kind", "num_bytes"), [("rms", 4), ("layer", 8)])
def test_bytes_kept(kind, num_bytes):
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, delta = (torch.randn(4, 8).bfloat16().requires_grad_() for _ in range(2))
    weight = torch.randn(8).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        total, _ = add_norm(x, delta, weight, kind=kind, eps=EPS, rate=0.5)
    assert saved.pop(weight.untyped_storage().data_ptr()) == 16
    assert total.untyped_storage().data_ptr() in saved
    assert sum(saved.values()) == 4 * (2 * 8 + num_bytes)


X, ROW = torch.ones(2, 4), torch.ones(4)
NO_KIND: Any = "max"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rms_norm(X, torch.ones(3)),
            r"weight of a norm must have shape \(4,\), got \(3,\)",
        ),
        (lambda: layer_norm(X, ROW, torch.ones(2, 4)), r"bias .* got \(2, 4\)"),
        (lambda: add_norm(X, X[:1], ROW, kind="rms", eps=1), r"delta .* got \(1, 4\)"),
        (lambda: add_norm(X, X, ROW, kind=NO_KIND, eps=1), "one of rms, layer, got 'max'"),
        (
            lambda: add_norm(X, X, ROW, ROW, kind="rms", eps=1),
            "bias must be None for a norm of kind rms, got a tensor",
        ),
        (lambda: add_norm(X, X, ROW, kind="rms", eps=1, rate=1.0), "below 1, got 1.0"),
        (lambda: rms_norm(X, ROW, 0.0), "above 0 and finite, got 0.0"),
        (lambda: rms_norm(X, ROW, float("nan")), "got nan"),
        (lambda: rms_norm(X.long(), ROW), "x of a norm must be floating point, got torch.int64"),
        (lambda: rms_norm(X, ROW.to("meta")), "weight of a norm must be on cpu as x is, got meta"),
        (
            lambda: rms_norm(X[:, :0], ROW[:0]),
            r"x must have at least one column, got shape \(2, 0\)",
        ),
        (lambda: rms_norm(X[0, 0], ROW), "at least one column"),
    ],
)
def test_what_is_no_norm_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_training_alone_drops():
    numbers = torch.get_rng_state()
    total, _ = add_norm(X, X, ROW, kind="rms", eps=EPS, rate=0.5, training=False)
    assert torch.equal(total, 2 * X)
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("centred", [False, True])
def test_torch_accepts_the_operations(centred):
    x, delta, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    bias = weight if centred else None
    forward = (x, delta, weight, bias, EPS, centred, torch.bfloat16, 0.2, 5, None)
    torch.library.opcheck(twin.forward_op, forward)
    _, normed, rstd, mean = twin.forward_op(*forward)
    backward = (normed, delta, x, weight, bias, rstd, mean, EPS, centred, True)
    torch.library.opcheck(twin.backward_op, backward)


LAUNCHES = """
import torch
from pykern.kernels.gpu import norm_operation as norm

def run(columns, centred, rate, dtype, seed=(5, None)):
    x, row = torch.empty(64, columns, dtype=dtype), torch.empty(columns, dtype=dtype)
    bias = row if centred else None
    _, _, rstd, mean = norm.add_and_normalise(x, x, row, bias, 1e-5, centred, dtype, rate, *seed)
    norm.gradients(x, x, x, row, bias, rstd, mean, 1e-5, centred, True)

run(4096, False, 0.0, torch.bfloat16)
run(8192, True, 0.3, torch.bfloat16)
run(16384, True, 0.3, torch.bfloat16)
run(16384, True, 0.3, torch.float32)
run(32768, True, 0.3, torch.bfloat16)
run(8192, True, 0.0, torch.float32)
# The same kernels, or a capture would have to load others.
run(8192, True, 0.5, torch.bfloat16, (0, torch.arange(2)[1:]))
run(16384, True, 0.5, torch.bfloat16, (0, torch.arange(2)[1:]))
run(32768, True, 0.5, torch.bfloat16, (0, torch.arange(2)[1:]))
"""

# Rows whose ends are not aligned, so that elements are loaded one by one.
ODD = """
for columns in (129, 2049, 4097, 8191):
    for dtype in (torch.bfloat16, torch.float32):
        run(columns, True, 0.3, dtype)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    names = sorted(kernel.name for kernel in kernels)
    # Rows of 16,384 columns are read once by the forward, and twice by the backward.
    assert names == [
        *("add_parts", *["backward"] * 5, *["forward"] * 6, "statistics", *["sums"] * 2)
    ]
    for kernel in kernels:
        assert kernel.spills == 0
        # Narrower loads are one number for each row, and a seed that may be in memory.
        loads, stores = kernel.accesses("LDG"), kernel.accesses("STG")
        assert loads.pop(64, 0) <= 1
        assert set(loads) <= {128, 32}
        assert loads.get(32, 0) <= 4
        assert set(stores) <= {128, 32}
        assert stores.get(32, 0) <= 2
        if kernel.name == "forward":
            # 41 is what an H200 can hide behind its memory.
            assert kernel.num_instructions / 16 < 42


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sm90_rows_whose_ends_are_not_aligned_do_not_spill():
    kernels = compiled_for_sm90(LAUNCHES.partition("run(4096")[0] + ODD)
    assert {kernel.name for kernel in kernels} == {"add_parts", "backward", "forward"}
    assert {kernel.name: kernel.spills for kernel in kernels if kernel.spills} == {}

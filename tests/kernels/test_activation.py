from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from pykern.kernels import activation as twin
from pykern.kernels.activation import Activation, geglu, gelu, swiglu
from pykern.kernels.gpu import activation as gpu
from tests.kernels.acceptance import Canaries, assert_accepted, padded, uninitialised_is_nan
from tests.kernels.activation_cases import exact, terms
from tests.kernels.sm90 import compiled_for_sm90

KINDS: tuple[Activation, ...] = ("swiglu", "geglu", "gelu", "gelu_tanh")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case(
    kind: Activation, rows: list[int], columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient, x and bias, of all sizes that an activation treats in different ways."""
    gated = kind in twin.GATED
    x = torch.randn(*rows, columns * (2 if gated else 1)) * 4
    x.view(-1)[::7] *= 8
    bias = None if gated else torch.randn(columns).to(dtype)
    return torch.randn(*rows, columns).to(dtype), x.to(dtype), bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [twin, gpu])
def test_results_are_as_near_as_float32_allows(where, dtype, kind):
    gradient, x, bias = case(kind, [40], 300, dtype)
    result = where.activated(x, bias, kind)
    of_x, of_bias, again = where.differentiated(gradient, x, bias, kind, True)
    assert torch.equal(again, result)
    assert (result.dtype, of_x.dtype) == (dtype, dtype)
    expected, sums = exact(gradient, x, bias, kind), terms(gradient, x, bias, kind)
    assert_accepted(result, expected[0], sums[0])
    assert_accepted(of_x, expected[1], sums[1], factor=8)
    if bias is not None:
        assert of_bias.dtype == torch.float32
        assert_accepted(of_bias, expected[2], sums[2], factor=8)


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    padding=st.integers(0, 5),
    offset=st.integers(0, 3),
)
def test_kernels_keep_to_their_tensors(kind, rows, columns, dtype, padding, offset):
    gradient, x, bias = case(kind, rows, columns, dtype)
    expected, sums = exact(gradient, x, bias, kind), terms(gradient, x, bias, kind)
    if rows:
        gradient, x = padded(gradient, padding, offset), padded(x, padding, offset)
    before = gradient.clone(), x.clone()
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(torch, "empty", canaries.empty)
        result = gpu.activated(x, bias, kind)
        of_x, of_bias, again = gpu.differentiated(gradient, x, bias, kind, True)
        short = gpu.differentiated(gradient, x, bias, kind, False)
    canaries.check()
    assert torch.equal(again, result)
    assert_accepted(result, expected[0], sums[0])
    assert_accepted(of_x, expected[1], sums[1], factor=8)
    assert not torch.isnan(of_bias).any()
    assert torch.equal(short[0], of_x)
    assert torch.equal(short[1], of_bias)
    assert short[2].numel() == 0
    assert torch.equal(gradient, before[0])
    assert torch.equal(x, before[1])


def test_bias_sums_of_groups_leave_no_row_out(monkeypatch):
    gradient, x, bias = case("gelu_tanh", [41], 300, torch.float32)
    whole = gpu.differentiated(gradient, x, bias, "gelu_tanh", False)
    for num_groups in (1, 2, 5):
        monkeypatch.setattr(gpu, "_NUM_GROUPS", num_groups)
        of_x, of_bias, _ = gpu.differentiated(gradient, x, bias, "gelu_tanh", False)
        assert torch.equal(of_x, whole[0])
        assert torch.allclose(of_bias, whole[1], rtol=1e-5, atol=1e-4)


def test_no_rows_have_gradients_of_zero():
    for where in (twin, gpu):
        gradient, x, bias = case("gelu", [0], 5, torch.float32)
        of_x, of_bias, again = where.differentiated(gradient, x, bias, "gelu", True)
        assert of_x.shape == again.shape == (0, 5)
        assert torch.equal(of_bias, torch.zeros(5))


@pytest.mark.parametrize("where", [twin, gpu])
def test_what_is_no_number_stays_none(where):
    x = torch.full((1, 4), float("nan"))
    for kind in KINDS:
        assert torch.isnan(where.activated(x, None, kind)).all()
        gradient = torch.ones_like(where.activated(x, None, kind))
        assert torch.isnan(where.differentiated(gradient, x, None, kind, False)[0]).all()


FUNCTIONS: dict[Activation, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": gelu,
    "gelu_tanh": lambda x, bias=None: gelu(x, bias, approximate="tanh"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact(kind):
    _, x, bias = case(kind, [3], 4, torch.float64)
    arguments = [t.requires_grad_() for t in (x / 8, bias) if t is not None]
    assert gradcheck(FUNCTIONS[kind], arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_may_run_again_and_is_not_differentiated(kind):
    gradient, x, _ = case(kind, [3, 2], 4, torch.float32)
    x.requires_grad_()
    result = FUNCTIONS[kind](x)
    (first,) = torch.autograd.grad(result, x, gradient, retain_graph=True)
    (second,) = torch.autograd.grad(result, x, gradient)
    assert torch.equal(first, second)
    assert torch.allclose(first, exact(gradient, x, None, kind)[1].float(), atol=1e-4)
    for loss in (FUNCTIONS[kind](x).square().sum(), FUNCTIONS[kind](x).sum()):
        with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_torch_accepts_the_operations(kind):
    gradient, x, bias = case(kind, [3], 4, torch.float32)
    torch.library.opcheck(twin.activate, (x, bias, kind))
    torch.library.opcheck(twin.activate_backward, (gradient, x, bias, kind, True))


def test_wrong_arguments_are_refused():
    x = torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"even number of columns.*\[2, 5\]"):
        swiglu(x)
    with pytest.raises(ValueError, match=r"x must have columns for gelu, got shape \[2, 0\]"):
        gelu(x[:, :0])
    with pytest.raises(
        ValueError, match=r"bias must have shape \[5\], one number for each column of x, got \[4\]"
    ):
        gelu(x, torch.ones(4))
    with pytest.raises(ValueError, match="bias must be on cpu as x is, got meta"):
        gelu(x, torch.ones(5, device="meta"))
    with pytest.raises(ValueError, match="one of none, tanh, got 'erf'"):
        gelu(x, approximate="erf")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x and bias must be floating point, got torch.int64"):
        geglu(x.long())


LAUNCHES = """
import torch
from pykern.kernels.gpu import activation
half, both = (torch.empty(64, n, dtype=torch.bfloat16) for n in (4096, 8192))
activation.activated(both, None, "swiglu")
activation.activated(half, half[0], "gelu")
activation.differentiated(half.float(), both.float(), None, "swiglu", True)
for kind in ("swiglu", "geglu"):
    activation.differentiated(half, both, None, kind, True)
for kind in ("gelu", "gelu_tanh"):
    activation.differentiated(half, half, half[0], kind, True)
activation.differentiated(half, half, half[0], "gelu", False)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    assert len(kernels) == 8
    for kernel in kernels:
        assert kernel.spills == 0
        loads, stores = kernel.accesses("LDG"), kernel.accesses("STG")
        # A bias, one load for the columns of a program, and what is summed of its gradient.
        assert loads.pop(32, 0) + loads.pop(64, 0) <= 1
        assert stores.pop(64, 0) <= 1
        assert set(loads) == set(stores) == {128}
        num_bytes = 16 * kernel.num_threads * (loads[128] + stores[128])
        # 41 for four bytes is what an H200 can hide behind its memory.
        assert kernel.num_instructions * kernel.num_threads / num_bytes < 41 / 4

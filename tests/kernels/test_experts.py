import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pykern.kernels import grouped, levels, row_sums, weighted_swiglu
from pykern.kernels.experts import experts
from pykern.kernels.gpu import row_sums as gpu_sums
from pykern.kernels.gpu import weighted_swiglu as gpu_swiglu
from pykern.kernels.routing import route
from pykern.runtime.autograd.split import backward_to_inputs
from tests.kernels.acceptance import Canaries, assert_accepted, padded, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for_sm90
from tests.kernels.test_routing import LAYOUTS, NoReading

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWIGLU = {"twin": weighted_swiglu, "kernel": gpu_swiglu}
SUMS = {"twin": row_sums, "kernel": gpu_sums}


def plainly(x, routing, gate_up, down):
    """A loop over experts, each with the tokens that chose it."""
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        tokens, choices = (routing.experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        product = F.silu(gate) * up * routing.weights[tokens, choices, None].to(x.dtype)
        y = y.index_add(0, tokens, F.linear(product, down[expert]))
    return y


def layer(num_tokens=6, num_experts=4, width=4, hidden=8, dtype=torch.float64):
    shapes = ((num_tokens, width), (num_experts, 2 * hidden, width), (num_experts, width, hidden))
    tensors = [(torch.randn(shape) / 2).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randn(num_tokens, num_experts).to(dtype).requires_grad_()


def gradients_of(function, x, gate_up, down, logits, num_chosen):
    y = function(x, route(logits, num_chosen), gate_up, down)
    weighted = (y * torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)).sum()
    return [y, *torch.autograd.grad(weighted, (x, gate_up, down, logits))]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(6, 4, 2), (7, 5, 1), (3, 3, 3), (1, 4, 2), (0, 4, 2), (2, 9, 1), (5, 1, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_a_loop_over_experts(num_tokens, num_experts, num_chosen, dtype):
    (x, gate_up, down), logits = layer(num_tokens, num_experts, dtype=dtype)
    ours = gradients_of(experts, x, gate_up, down, logits, num_chosen)
    plain = gradients_of(plainly, x, gate_up, down, logits, num_chosen)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other)


def test_all_tokens_to_one_expert():
    (x, gate_up, down), _ = layer()
    logits = torch.tensor([0.0, 0, 50, 1]).double().expand(6, -1).clone().requires_grad_()
    ours = gradients_of(experts, x, gate_up, down, logits, 1)
    plain = gradients_of(plainly, x, gate_up, down, logits, 1)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other)
    assert (ours[2][[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_plain_torch(dtype):
    (x, gate_up, down), logits = layer(24, 4, 16, 24, dtype)
    ours = gradients_of(experts, x, gate_up, down, logits, 2)
    plain = gradients_of(plainly, x, gate_up, down, logits, 2)
    x, gate_up, down, logits = (
        t.detach().double().requires_grad_() for t in (x, gate_up, down, logits)
    )
    exactly = gradients_of(plainly, x, gate_up, down, logits, 2)
    for mine, other, exact in zip(ours, plain, exactly, strict=True):
        assert mine.dtype == dtype
        off, allowed = (mine - exact).norm(), (other - exact).norm()
        assert off <= 1.5 * allowed


def test_gradients_are_exact():
    (x, gate_up, down), logits = layer(3, 3, 2, 2)

    def function(x, gate_up, down, logits):
        return experts(x, route(logits, 2), gate_up, down)

    assert torch.autograd.gradcheck(function, (x, gate_up, down, logits))
    total = function(x, gate_up, down, logits).square().sum()
    with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
        torch.autograd.grad(total, x, create_graph=True)


def test_levels_and_second_backwards_have_the_same_bits():
    tensors, logits = layer(9, dtype=torch.float32)
    everything = []
    for level in ("none", "ops"):
        with levels.keeping(level):
            y = experts(tensors[0], route(logits, 2), *tensors[1:])
        for _ in range(2):
            everything.append(torch.autograd.grad(y.sum(), (*tensors, logits), retain_graph=True))
    for other in everything[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everything[0], other, strict=True))


def test_both_parts_of_a_split_backward():
    tensors, logits = layer(9, dtype=torch.float32)
    x, gate_up, down = tensors
    y = experts(x, route(logits, 2), gate_up, down)
    expected = torch.autograd.grad(y.sum(), (*tensors, logits))
    y = experts(x, route(logits, 2), gate_up, down)
    rest = backward_to_inputs([y], [torch.ones_like(y)], [x, logits], lambda: None)
    assert gate_up.grad is None
    assert rest is not None
    rest()
    for tensor, gradient in zip((*tensors, logits), expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("level", levels.LEVELS)
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (1, 2)])
def test_what_is_frozen_gets_no_gradient(level, frozen):
    tensors, logits = layer(9, dtype=torch.float32)
    for position in frozen:
        tensors[position].requires_grad_(False)
    with levels.keeping(level):
        y = experts(tensors[0], route(logits, 2), *tensors[1:])
    y.sum().backward()
    assert [t.grad is None for t in tensors] == [i in frozen for i in range(3)]
    assert logits.grad is not None


def saved_bytes(level, num_tokens, num_chosen, width, hidden):
    """The bytes kept for each token, without parameters and without those of routing itself."""
    (x, gate_up, down), logits = layer(num_tokens, 4, width, hidden, torch.bfloat16)
    routing = route(logits, num_chosen)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with levels.keeping(level), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        experts(x, routing, gate_up, down)
    for aside in (gate_up, down, routing.ends):
        del kept[aside.untyped_storage().data_ptr()]
    return sum(kept.values()) / num_tokens


def test_what_is_kept():
    width, hidden, num_chosen = 16, 24, 2
    routed = 12 * num_chosen
    ops = 2 * width + 4 * hidden * num_chosen + routed
    assert saved_bytes("ops", 10, num_chosen, width, hidden) == ops
    none = ops + (2 * width + 2 * hidden) * num_chosen
    assert saved_bytes("none", 10, num_chosen, width, hidden) == none
    # In 8 bits with a float32 for 128 columns.
    stash = 2 * width + (2 * 64 + 4) * num_chosen + routed
    assert saved_bytes("ops+stash", 10, num_chosen, width, 64) == stash


def test_gradients_from_8_bits_are_near():
    tensors, logits = layer(20, 4, 16, 64, torch.float32)
    everything = []
    for level in ("ops", "ops+stash"):
        with levels.keeping(level):
            y = experts(tensors[0], route(logits, 2), *tensors[1:])
        everything.append([y, *torch.autograd.grad(y.square().sum(), (*tensors, logits))])
    exact, near = everything
    assert torch.equal(exact[0], near[0])
    for one, other in zip(exact[1:], near[1:], strict=True):
        assert 0 < (one - other).norm() < 0.02 * one.norm()


def test_nothing_is_read_from_tensors():
    tensors, logits = layer(dtype=torch.float32)
    with NoReading():
        experts(tensors[0], route(logits, 2), *tensors[1:]).sum().backward()
    assert logits.grad is not None


def test_autocast_is_that_of_linear_layers():
    (x, gate_up, down), logits = layer(9, 4, 8, 16, torch.float32)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, gate_up, down)]
    routing = route(logits.detach(), 2)
    expected = experts(low[0], routing, *low[1:])
    expected.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, routing, gate_up, down)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, expected)
        y.sum().backward()
    for tensor, other in zip((x, gate_up, down), low, strict=True):
        assert tensor.grad.dtype == torch.float32
        assert torch.equal(tensor.grad.bfloat16(), other.grad)


def test_sizes_are_told_without_values():
    with FakeTensorMode():
        (x, gate_up, down), logits = layer(dtype=torch.float32)
        y = experts(x, route(logits, 2), gate_up, down)
        y.sum().backward()
    assert y.shape == x.shape
    assert logits.grad is not None
    assert gate_up.grad is not None
    assert gate_up.grad.shape == gate_up.shape


def test_other_leading_sizes():
    (x, gate_up, down), logits = layer()
    y = experts(x, route(logits, 2), gate_up, down)
    folded = experts(x.view(2, 3, 4), route(logits.view(2, 3, 4), 2), gate_up, down)
    assert torch.equal(folded, y.view(2, 3, 4))


def test_what_does_not_fit_is_refused():
    (x, gate_up, down), logits = layer(dtype=torch.float32)
    routing = route(logits, 2)
    with pytest.raises(ValueError, match=r"got \[6, 4\], \[4, 16, 4\] and \[4, 8, 4\]"):
        experts(x, routing, gate_up, down.mT)
    with pytest.raises(
        ValueError, match=r"routing must be of the tokens of x, .*, got one of 6 tokens"
    ):
        experts(x[:5], routing, gate_up, down)
    with pytest.raises(ValueError, match="one floating type"):
        experts(x, routing, gate_up.double(), down)
    with pytest.raises(ValueError, match="one device"):
        experts(x.to("meta"), routing, gate_up, down)
    with pytest.raises(ValueError, match=r"multiples of 8 in torch\.bfloat16, got 4 and 8"):
        experts(x.bfloat16(), routing, gate_up.bfloat16(), down.bfloat16())


@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0, 4), (0, 0, 0), (2,)])
def test_rows_without_a_grouped_product_of_torch(monkeypatch, sizes):
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows, others = torch.randn(sum(sizes), 4), torch.randn(sum(sizes), 8)
    matrices = torch.randn(len(sizes), 8, 4).mT
    expected = grouped.times(rows, matrices, ends), grouped.outer(rows, others, ends)
    monkeypatch.setattr(grouped, "_native", lambda _: False)
    torch.testing.assert_close(grouped.times(rows, matrices, ends), expected[0])
    torch.testing.assert_close(grouped.outer(rows, others, ends), expected[1])


def poison(form, patch, canaries):
    if form == "kernel":
        patch.setattr(torch, "empty", canaries.empty)


@pytest.mark.parametrize("form", SWIGLU)
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 40)),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUTS,
    form_of_kernel=st.tuples(st.sampled_from([16, 1024]), st.booleans()),
)
def test_weighted_swiglu(form, sizes, dtype, layout, form_of_kernel):
    (num_rows, hidden), (block, again) = sizes, form_of_kernel
    gate_up = (torch.randn(num_rows, 2 * hidden) * 3).to(dtype)
    weights, order = torch.rand(num_rows, 1), torch.randperm(num_rows).to(torch.int32)
    gradient = torch.randn(num_rows, hidden).to(dtype)
    leaf = gate_up.double().requires_grad_()
    scales = weights.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    exact = F.silu(gate) * up * scales[order.long()]
    of_gate_up, of_weights = torch.autograd.grad(exact, (leaf, scales), gradient.double())
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(gpu_swiglu, "_BLOCK", block)
        poison(form, patch, canaries)
        strided = padded(gate_up, *layout)
        product = SWIGLU[form].product(strided, weights, order)
        results = SWIGLU[form].product_gradient(
            padded(gradient, *layout), strided, weights, order, again
        )
    canaries.check()
    # An exponential of float32 is off by some roundings of its argument.
    steep = 2 + gate.detach().abs()
    assert_accepted(product, exact.detach(), exact.detach().abs() * steep)
    assert torch.equal(results[2], product if again else product.new_empty(0))
    slope = (gradient.double() * scales.detach()[order.long()]).abs() * steep
    terms = torch.cat((up.detach().abs() * slope, gate.detach().abs() * slope), dim=-1)
    assert_accepted(results[0], of_gate_up, terms * 2)
    sums = torch.empty(num_rows, 1, dtype=torch.float64)
    sums[order.long()] = (
        (gradient.double() * F.silu(gate.detach()) * up.detach() * steep)
        .abs()
        .sum(-1, keepdim=True)
    )
    assert_accepted(results[1], of_weights, sums * 2)


@pytest.mark.parametrize("form", SUMS)
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 40)),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUTS,
    block=st.sampled_from([16, 1024]),
)
def test_row_sums(form, sizes, dtype, layout, block):
    num_tokens, num_terms, width = sizes
    rows = torch.randn(num_tokens * num_terms, width).to(dtype)
    places = torch.randperm(len(rows)).to(torch.int32).view(num_tokens, num_terms)
    terms = rows.double()[places.long()]
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(gpu_sums, "_BLOCK", block)
        poison(form, patch, canaries)
        result = SUMS[form].summed(padded(rows, *layout), places)
    canaries.check()
    assert_accepted(result, terms.sum(1), terms.abs().sum(1))


def test_torch_accepts_the_operations():
    gate_up, weights = torch.randn(6, 8), torch.rand(3, 2)
    order = torch.randperm(6).to(torch.int32)
    arguments = (gate_up, weights, order)
    torch.library.opcheck(torch.ops.pykern.weighted_swiglu.default, arguments)
    torch.library.opcheck(
        torch.ops.pykern.weighted_swiglu_gradient.default, (torch.randn(6, 4), *arguments, True)
    )
    torch.library.opcheck(torch.ops.pykern.row_sums.default, (gate_up, order.view(3, 2)))


LAUNCHES = """
import torch
from pykern.kernels.gpu import row_sums, weighted_swiglu
order, weights = torch.zeros(64, dtype=torch.int32), torch.zeros(32, 2)
gate_up = torch.empty(64, 28672, dtype=torch.bfloat16)
product = weighted_swiglu.product(gate_up, weights, order)
weighted_swiglu.product_gradient(product, gate_up, weights, order, True)
row_sums.summed(torch.empty(64, 8192, dtype=torch.bfloat16), order.view(32, 2))
"""


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.spills == 0
        # Beside rows, a weight, a gradient of it and places, of 32.
        assert set(kernel.accesses("STG")) - {32} == {128}
        assert set(kernel.accesses("LDG")) - {32} == {128}

import math
import re
from decimal import Context, Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pykern.kernels import rope as op
from pykern.kernels.gpu import rope as gpu
from pykern.kernels.rope import rope
from tests.kernels.acceptance import Canaries, assert_accepted, padded, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for, compiled_for_sm90

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"twin": op, "kernel": gpu}


def turned(x, offset, base=10000.0, sign=1):
    """By the definition in float64, pair by pair as complex numbers; and the terms of each sum."""
    *_, seq, head_dim = x.shape
    half = head_dim // 2
    positions = range(offset, offset + seq)
    angles = [[p * base ** (-2 * i / head_dim) for i in range(half)] for p in positions]
    turns = torch.polar(
        torch.ones(seq, half).double(),
        sign * torch.tensor(angles, dtype=torch.float64).view(seq, half),
    )
    first, second = x.double().split(half, dim=-1)
    result = torch.complex(first, second) * turns
    exact = torch.cat((result.real, result.imag), dim=-1)
    return exact, torch.cat([first.abs() + second.abs()] * 2, dim=-1)


def heads_of(qkv, num_heads, num_kv_heads):
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).transpose(-3, -2)
    return heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [0, 1_000_003])
def test_results_are_accepted(form, dtype, offset):
    qkv = torch.randn(2, 6, 4 * 24).to(dtype)
    results = FORMS[form].turned(qkv, 2, 1, 10000.0, offset)
    for ours, given_ in zip(results[:2], heads_of(qkv, 2, 1), strict=False):
        assert_accepted(ours, *turned(given_, offset))
    assert torch.equal(results[2], heads_of(qkv, 2, 1)[2])
    gradients = [torch.randn_like(x) for x in results]
    back = FORMS[form].turned_back(*gradients, 10000.0, offset)
    for ours, given_ in zip(heads_of(back, 2, 1)[:2], gradients, strict=False):
        assert_accepted(ours, *turned(given_, offset, sign=-1))
    assert torch.equal(heads_of(back, 2, 1)[2], gradients[2])


@settings(max_examples=12)
@given(
    leading=st.lists(st.integers(0, 2), max_size=2),
    seq=st.integers(0, 4),
    all_heads=st.sampled_from([(1, 1), (3, 1), (2, 2), (6, 2)]),
    half=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    layout=st.tuples(st.integers(0, 5), st.integers(0, 3)),
)
def test_kernel_takes_any_layout(leading, seq, all_heads, half, dtype, layout):
    heads, kv_heads = all_heads
    qkv = torch.randn(*leading, seq, (heads + 2 * kv_heads) * 2 * half).to(dtype)
    gradients = [x.clone() for x in heads_of(qkv, heads, kv_heads)]
    strided = [padded(x, *layout) if x.numel() else x for x in gradients]
    place = (500.0, 70_000)
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(torch, "empty", canaries.empty)
        results = gpu.turned(padded(qkv, *layout), heads, kv_heads, *place)
        back = gpu.turned_back(strided[0], strided[1], strided[2], *place)
    canaries.check()
    assert [x.shape for x in results] == [x.shape for x in gradients]
    for result in results:
        assert result.transpose(-3, -2).is_contiguous()
    for ours, given_ in zip(results[:2], gradients, strict=False):
        assert_accepted(ours, *turned(given_, place[1], place[0]))
    assert torch.equal(results[2], gradients[2])
    assert back.shape == qkv.shape
    returned = heads_of(back, heads, kv_heads)
    for ours, given_ in zip(returned[:2], gradients, strict=False):
        assert_accepted(ours, *turned(given_, place[1], place[0], sign=-1))
    assert torch.equal(returned[2], gradients[2])


def test_heads_are_taken_some_at_a_time(monkeypatch):
    qkv = torch.randn(3, 7 * 8)
    expected = gpu.turned(qkv, 5, 1, 10000.0, 9)
    monkeypatch.setattr(gpu, "_BLOCK", 8)
    for ours, other in zip(gpu.turned(qkv, 5, 1, 10000.0, 9), expected, strict=True):
        assert torch.equal(ours, other)


def test_positions_continue_at_the_offset():
    qkv = torch.randn(2, 8, 6 * 4)
    whole = rope(qkv, 4, 1)
    parts = [rope(qkv[:, :3], 4, 1), rope(qkv[:, 3:], 4, 1, offset=3)]
    for all_at_once, *pieces in zip(whole, *parts, strict=True):
        assert torch.equal(all_at_once, torch.cat(pieces, dim=-2))


def test_products_depend_on_distance_alone():
    q = torch.randn(16, dtype=torch.float64)
    k = torch.randn(16, dtype=torch.float64)
    rows = torch.cat((q, k, k)).expand(9, -1)
    turned_q, turned_k, _ = rope(rows, 1, 1)
    products = turned_q[0] @ turned_k[0].T
    for distance in range(9):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1])


def test_gradients_are_exact_and_nothing_is_saved():
    qkv = torch.randn(2, 3, 4 * 6, dtype=torch.float64, requires_grad=True)
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = rope(qkv, 2, 1, offset=5)
    assert saved == []
    assert torch.autograd.gradcheck(lambda x: rope(x, 2, 1, offset=5), (qkv,))
    total = torch.stack([(x * x).sum() for x in results]).sum()
    first, second = (torch.autograd.grad(total, qkv, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    # Turning keeps lengths.
    assert torch.allclose(first, 2 * qkv)
    for loss in (total, results[0].sum()):
        with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
            torch.autograd.grad(loss, qkv, create_graph=True)


def test_one_result_alone_has_a_gradient():
    qkv = torch.randn(2, 3, 4 * 6, requires_grad=True)
    rope(qkv, 2, 1)[1].sum().backward()
    assert qkv.grad is not None
    gradient = qkv.grad.unflatten(-1, (4, 6))
    assert (gradient[..., [0, 1, 3], :] == 0).all()
    assert (gradient[..., 2, :] != 0).any()


@pytest.mark.parametrize(
    ("shape", "heads", "keywords", "message"),
    [
        ((2, 12), (3, 2), {}, "multiple of num_kv_heads"),
        ((2, 12), (1, 0), {}, "at least 1"),
        ((2, 9), (1, 1), {}, "even head_dim"),
        ((2, 10), (1, 1), {}, "3 heads"),
        ((6,), (1, 1), {}, r"\[.., seq"),
        ((2, 6), (1, 1), {"base": 1.0}, "above 1"),
        ((2, 6), (1, 1), {"base": math.nan}, "above 1"),
        ((2, 6), (1, 1), {"base": math.inf}, "finite"),
        ((2, 6), (1, 1), {"offset": -1}, "at least 0"),
    ],
)
def test_what_does_not_fit_is_refused(shape, heads, keywords, message):
    with pytest.raises(ValueError, match=message):
        rope(torch.ones(shape), *heads, **keywords)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="floating"):
        rope(torch.ones(2, 6, dtype=torch.int64), 1, 1)


def test_torch_accepts_the_operations():
    qkv = torch.randn(2, 3, 4 * 6)
    results = op.turned(qkv, 2, 1, 100.0, 1)
    torch.library.opcheck(torch.ops.pykern.rope.default, (qkv, 2, 1, 100.0, 1))
    torch.library.opcheck(torch.ops.pykern.rope_gradient.default, (*results, 100.0, 1))


LAUNCHES = """
import torch
from pykern.kernels.gpu import rope
for heads, kv_heads, head_dim in ((32, 8, 128), (16, 16, 64)):
    qkv = torch.empty(2, 512, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
    q, k, v = rope.turned(qkv, heads, kv_heads, 500000.0, 0)
    rope.turned_back(q, k, v, 500000.0, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_no_instruction_computes_in_float64(capability):
    # Many GPUs have one unit of float64 for 64 of float32.
    for kernel in compiled_for(LAUNCHES, capability):
        of_float64 = [x for x in kernel.opcodes if re.match(r"D[A-Z]|.*F64", x)]
        assert of_float64 == []


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.spills == 0
        assert set(kernel.accesses("STG")) == {128}
        assert set(kernel.accesses("LDG")) == {128}
        assert kernel.registers <= 128
        # With angles in float64 there were 974 to 998.
        assert kernel.num_instructions <= 800


PI = Decimal("3.14159265358979323846264338327950288419716939937511")


def exact_cos_sin(position, base, half):
    """Cosines and sines of all pairs, by angles of 50 digits less their whole turns."""
    with localcontext(Context(prec=50)):
        turns = [position * Decimal(base) ** (Decimal(-i) / half) / (2 * PI) for i in range(half)]
        angles = [float(turn % 1 * 2 * PI) for turn in turns]
    return [list(map(math.cos, angles)), list(map(math.sin, angles))]


@pytest.mark.parametrize(("base", "half"), [(10000.0, 64), (500000.0, 50), (1.5, 3), (1e30, 1)])
@pytest.mark.parametrize("position", [1, 2**20, 2**24 + 1, 2**31 - 1, 2**32 + 12345])
def test_far_positions_have_exact_angles(position, base, half):
    ones = torch.cat((torch.ones(half), torch.zeros(half))).repeat(3)[None]
    q, _, _ = gpu.turned(ones, 1, 1, base, position)
    exact = torch.tensor(exact_cos_sin(position, base, half), dtype=torch.float64)
    assert (q[0, 0].view(2, half) - exact).abs().max() < 2**-23


def test_errors_of_angles_grow_by_the_position():
    place, half = 2**40, 64
    ones = torch.cat((torch.ones(half), torch.zeros(half))).repeat(3)[None]
    q, _, _ = gpu.turned(ones, 1, 1, 500000.0, place)
    exact = torch.tensor(exact_cos_sin(place, 500000.0, half), dtype=torch.float64)
    assert (q[0, 0].view(2, half) - exact).abs().max() < 2 * math.pi * 2.0**-60 * place


def test_small_angles_keep_all_their_digits():
    ones = torch.tensor([1.0] * 64 + [0.0] * 64).repeat(3)[None]
    q, _, _ = gpu.turned(ones, 1, 1, 1e9, 1)
    exact = torch.tensor(exact_cos_sin(1, 1e9, 64)[1], dtype=torch.float64)
    assert ((q[0, 0, 64:] - exact) / exact).abs().max() < 2**-22


def test_the_base_is_taken_in_full_precision():
    # In float32 its logarithm would be off by 1e-7, which 1e6 positions make visible.
    qkv = torch.ones(1, 3 * 64)
    q, _, _ = gpu.turned(qkv, 1, 1, 10000.0, 10**7)
    exact = math.cos(1e7 * 10000.0 ** (-2 / 64)) - math.sin(1e7 * 10000.0 ** (-2 / 64))
    assert abs(q[0, 0, 1].item() - exact) < 1e-6

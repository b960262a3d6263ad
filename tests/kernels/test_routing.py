import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.kernels import routing as op
from pykern.kernels.gpu import routing as gpu
from pykern.kernels.routing import balance_loss, route
from tests.kernels.acceptance import Canaries, assert_accepted, padded, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for_sm90

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"twin": op, "kernel": gpu}
LAYOUTS = st.tuples(st.integers(0, 5), st.integers(0, 3))


class NoReading(TorchDispatchMode):
    """Raises where a value or a size would be read from tensors, which on a GPU is a wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        for reading in ("_local_scalar_dense", "nonzero", "unique", "bincount", "masked_select"):
            assert reading not in name
        if "index" in name and isinstance(args[1] if len(args) > 1 else None, (list, tuple)):
            assert all(x is None or x.dtype is not torch.bool for x in args[1])
        return func(*args, **(kwargs or {}))


def plainly(logits, num_chosen):
    """The fields of a routing, by lists: experts, order, places, ends."""
    experts = []
    for row in logits.tolist():
        ranked = sorted((-score, expert) for expert, score in enumerate(row))
        experts.append([expert for _, expert in ranked[:num_chosen]])
    choices = [e for row in experts for e in row]
    order = sorted(range(len(choices)), key=lambda i: (choices[i], i))
    places = sorted(range(len(order)), key=lambda r: order[r])
    ends = [sum(c <= e for c in choices) for e in range(logits.shape[1])]
    return experts, order, places, ends


def exact_weights(logits, experts):
    scores = logits.double()
    if experts.shape[1] == 1:
        return torch.softmax(scores, -1).gather(1, experts.long())
    return torch.softmax(scores.gather(1, experts.long()), -1)


def assert_routes(result, logits, num_chosen):
    weights, experts, order, places, ends = result
    expected = plainly(logits, num_chosen)
    for ours, numbers in zip((experts, order, places, ends), expected, strict=True):
        assert ours.dtype == torch.int32
        assert ours.tolist() == numbers
    exact = exact_weights(logits, experts)
    # An exponential of float32 is off by some roundings of its argument.
    assert_accepted(weights, exact, exact * (4 + logits.double().abs().amax(-1, keepdim=True)))
    return weights


@settings(max_examples=20)
@given(
    data=st.data(),
    num_tokens=st.integers(0, 70),
    num_experts=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0, 1, 30]),
    layout=LAYOUTS,
)
def test_both_forms_route_as_lists_do(data, num_tokens, num_experts, dtype, spread, layout):
    num_chosen = data.draw(st.integers(1, num_experts))
    # Whole numbers make ties.
    logits = (torch.randn(num_tokens, num_experts) * spread).round().to(dtype)
    assert_routes(op.chosen(logits, num_chosen), logits, num_chosen)
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(torch, "empty", canaries.empty)
        result = gpu.chosen(padded(logits, *layout), num_chosen)
    canaries.check()
    assert_routes(result, logits, num_chosen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_all_tokens_to_some_experts(form, num_chosen):
    logits = torch.arange(6.0).expand(130, -1)
    weights, experts, order, places, ends = FORMS[form].chosen(logits, num_chosen)
    assert_routes((weights, experts, order, places, ends), logits, num_chosen)
    assert (ends[: 6 - num_chosen] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_leaves_a_permutation(form):
    logits = torch.randn(5, 4)
    logits[1, 2] = float("nan")
    logits[2, 3] = -float("nan")
    logits[3] = float("-inf")
    logits[4, :2] = torch.tensor([0.0, -0.0])
    logits[4, 2:] = -1
    weights, experts, order, places, ends = FORMS[form].chosen(logits, 2)
    assert experts[1, 0] == 2
    assert experts[2, 0] == 3
    assert experts[3:].tolist() == [[0, 1], [0, 1]]
    assert order.sort().values.tolist() == list(range(10))
    assert places[order.long()].tolist() == list(range(10))
    assert ends[-1] == 10
    assert weights.isnan().all(dim=1).tolist() == [False, True, True, True, False]


@settings(max_examples=12)
@given(
    data=st.data(),
    num_tokens=st.integers(0, 12),
    num_experts=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUTS,
)
def test_gradients_are_accepted(data, num_tokens, num_experts, dtype, layout):
    num_chosen = data.draw(st.integers(1, num_experts))
    logits = torch.randn(num_tokens, num_experts).to(dtype)
    gradient = torch.randn(num_tokens, num_chosen)
    experts = op.chosen(logits, num_chosen)[1]
    leaf = logits.double().requires_grad_()
    (exact,) = torch.autograd.grad(exact_weights(leaf, experts), leaf, gradient.double())
    terms = gradient.double().abs().sum(1, keepdim=True).expand_as(exact)
    assert_accepted(op.chosen_gradient(gradient, logits, experts), exact, terms)
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(torch, "empty", canaries.empty)
        result = gpu.chosen_gradient(padded(gradient, *layout), padded(logits, *layout), experts)
    canaries.check()
    assert_accepted(result, exact, terms)


@pytest.mark.parametrize("num_chosen", [1, 2])
def test_gradients_are_exact(num_chosen):
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, num_chosen).weights, (logits,))
    assert torch.autograd.gradcheck(lambda x: balance_loss(x, route(x, num_chosen)), (logits,))
    weights = route(logits, num_chosen).weights
    for loss in (weights.square().sum(), weights[0, 0]):
        with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
            torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_logits_give_the_same_bits(form):
    logits = torch.randn(70, 8)
    first, second = (FORMS[form].chosen(logits.clone(), 2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_blocks_of_tokens_do_not_matter(monkeypatch):
    logits = torch.randn(70, 8).round()
    expected = gpu.chosen(logits, 3)
    for tokens in (1, 4):
        monkeypatch.setattr(gpu, "_MOST_TOKENS", tokens)
        for ours, other in zip(gpu.chosen(logits[:6], 3)[:2], expected[:2], strict=True):
            assert torch.equal(ours, other[:6])
        assert_routes(gpu.chosen(logits[:6], 3), logits[:6], 3)


def test_nothing_is_read_from_tensors():
    logits = torch.randn(6, 4, requires_grad=True)
    with NoReading():
        routing = route(logits, 2)
        (routing.weights.square().sum() + balance_loss(logits, routing)).backward()
    assert logits.grad is not None


def test_loss_of_balance():
    even = torch.eye(4).repeat(2, 1) * 100
    assert balance_loss(even, route(even, 1)).item() == pytest.approx(1)
    one = torch.tensor([100.0, 0, 0, 0]).expand(8, -1)
    assert balance_loss(one, route(one, 1)).item() == pytest.approx(4)
    logits = torch.randn(2, 3, 4)
    routing = route(logits, 2)
    shares = torch.zeros(4)
    for expert in routing.experts.flatten().tolist():
        shares[expert] += 1 / 12
    expected = 4 * (shares * torch.softmax(logits, -1).mean((0, 1))).sum()
    assert balance_loss(logits, routing).item() == pytest.approx(expected.item())
    nothing = torch.empty(0, 4)
    assert balance_loss(nothing, route(nothing, 2)).item() == 0
    with pytest.raises(
        ValueError, match=r"logits must be those of the routing, of 6 tokens to .* experts, got"
    ):
        balance_loss(even, routing)


@pytest.mark.parametrize("num_chosen", [0, 4])
def test_other_numbers_of_experts_are_refused(num_chosen):
    with pytest.raises(
        ValueError, match=f"num_chosen must be 1 to 3, the number of experts, got {num_chosen}"
    ):
        route(torch.ones(2, 3), num_chosen)


def test_other_logits_are_refused():
    with pytest.raises(ValueError, match="floating"):
        route(torch.ones(2, 3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"rows must be below 2\*\*31, got 2147483648"):
        route(torch.ones(1).expand(2**31, 1), 1)


def test_torch_accepts_the_operations():
    logits = torch.randn(5, 4)
    torch.library.opcheck(torch.ops.pykern.route.default, (logits, 2))
    arguments = (torch.randn(5, 2), logits, op.chosen(logits, 2)[1])
    torch.library.opcheck(torch.ops.pykern.route_gradient.default, arguments)


LAUNCHES = """
import torch
from pykern.kernels.gpu import routing
logits = torch.empty(512, 256, dtype=torch.bfloat16)
results = routing.chosen(logits, 8)
routing.chosen_gradient(*results[:1], logits, results[1])
"""


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    assert len(kernels) == 3
    assert all(kernel.spills == 0 for kernel in kernels)

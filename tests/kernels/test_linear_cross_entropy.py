import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.kernels import levels
from pykern.kernels.linear_cross_entropy import linear_cross_entropy
from pykern.runtime.autograd.split import backward_to_inputs
from tests.kernels.acceptance import assert_accepted
from tests.kernels.head_cases import IGNORED, Largest, case, cut_small, exactly


@pytest.fixture
def _small_chunks(monkeypatch):
    cut_small(monkeypatch)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_loss_and_gradients_are_right(num_rows, reduction):
    x, w, target = case(num_rows)
    loss = linear_cross_entropy(x, w, target, reduction=reduction)
    gradients = torch.autograd.grad(loss, (x, w))
    exact = exactly(x, w, target, reduction)
    count = 1 if reduction == "sum" else (target != IGNORED).sum()
    logits = x.double().abs() @ w.double().abs().T
    terms = (logits.amax(1) * 2 + 1).sum() / count
    assert_accepted(loss.detach(), exact[0], terms)
    of_logits = (logits.amax(1, keepdim=True) * 2 + 1) / count
    softmax = (x.double() @ w.double().T).softmax(1) + F.one_hot(target.clamp(min=0), 301)
    terms = (softmax * of_logits).detach()
    assert_accepted(gradients[0], exact[1], terms @ w.double().abs().detach())
    assert_accepted(gradients[1], exact[2], terms.T @ x.double().abs().detach())


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_torch(dtype):
    x, w, target = case(40, dtype)
    ours = linear_cross_entropy(x, w, target)
    theirs = F.cross_entropy(F.linear(x, w), target)
    for of_ours, of_theirs, exact in zip(
        [ours, *torch.autograd.grad(ours, (x, w))],
        [theirs, *torch.autograd.grad(theirs, (x, w))],
        exactly(x, w, target),
        strict=True,
    ):
        assert (of_ours - exact).norm() <= 2 * (of_theirs - exact).norm() + 1e-7


@pytest.mark.usefixtures("_small_chunks")
def test_gradients_are_exact():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1, 4, IGNORED], [0, 0, 2]])
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, target), (x, w))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("target", [[], [IGNORED, IGNORED]])
def test_nothing_counts(reduction, target):
    x, w, _ = case(len(target))
    theirs = F.cross_entropy(x @ w.T, torch.tensor(target, dtype=torch.int64), reduction=reduction)
    ours = linear_cross_entropy(x, w, torch.tensor(target, dtype=torch.int64), reduction=reduction)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan() or ours == theirs == 0
    for gradient in torch.autograd.grad(ours, (x, w)):
        assert not gradient.any()


@pytest.mark.parametrize("label", [-1, 301, 2**40])
def test_a_target_that_is_no_class_shows(label):
    x, w, target = case(5)
    target[2] = label
    loss = linear_cross_entropy(x, w, target)
    assert loss.isnan()
    (of_x,) = torch.autograd.grad(loss, x)
    assert of_x.isnan().all(1).tolist() == [False, False, True, False, False]


@pytest.mark.usefixtures("_small_chunks")
def test_every_level_has_the_same_bits_and_keeps_what_it_says():
    x, w, target = case(10, torch.bfloat16)
    found = []
    per_row: dict[levels.KernelLevel, int] = {"ops": 24 * 2 + 4, "none": 24 * 2 + 4 + 304 * 2}
    for level, bytes_per_row in per_row.items():
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with levels.keeping(level), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = linear_cross_entropy(x, w, target)
        kept = {t.data_ptr(): t for t in saved if t.dim() > 0}
        del kept[w.data_ptr()], kept[target.data_ptr()]
        assert sum(t.numel() * t.itemsize for t in kept.values()) == bytes_per_row * 10
        gradients = torch.autograd.grad(loss, (x, w), retain_graph=True)
        # Nothing that is kept has been written to.
        for once, twice in zip(gradients, torch.autograd.grad(loss, (x, w)), strict=True):
            assert torch.equal(once, twice)
        found.append((loss, *gradients))
    for of_ops, of_none in zip(*found, strict=True):
        assert torch.equal(of_ops, of_none)


@pytest.mark.usefixtures("_small_chunks")
def test_a_backward_in_two_parts_has_the_same_bits():
    gradients = []
    x, w, target = case(7)
    for split in (False, True):
        leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        loss = linear_cross_entropy(torch.tanh(leaf), weight, target)
        if split:
            weights = backward_to_inputs([loss], [torch.tensor(0.3)], [leaf], lambda: None)
            assert weight.grad is None
            assert weights is not None
            weights()
        else:
            loss.backward(torch.tensor(0.3))
        gradients.append((leaf.grad, weight.grad))
    for whole, parts in zip(*gradients, strict=True):
        assert torch.equal(whole, parts)


def test_frozen_arguments_get_no_gradient():
    x, w, target = case(4)
    expected = torch.autograd.grad(linear_cross_entropy(x, w, target), (x, w))
    of_x = torch.autograd.grad(linear_cross_entropy(x, w.detach(), target), x)
    of_w = torch.autograd.grad(linear_cross_entropy(x.detach(), w, target), w)
    assert torch.equal(of_x[0], expected[0])
    assert torch.equal(of_w[0], expected[1])


def test_a_second_derivative_is_refused():
    x, w, target = case(4)
    with pytest.raises(RuntimeError, match="create_graph must be False, got True"):
        torch.autograd.grad(linear_cross_entropy(x, w, target), x, create_graph=True)


def test_autocast_multiplies_in_its_type():
    x, w, target = case(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, target)
    narrow = linear_cross_entropy(x.bfloat16(), w.bfloat16(), target)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, narrow)
    of_x, of_w = torch.autograd.grad(loss, (x, w))
    assert of_x.dtype == of_w.dtype == torch.float32
    expected = torch.autograd.grad(narrow, (x, w))
    assert torch.equal(of_x, expected[0])
    # The weight's is not rounded to bfloat16 on its way.
    assert (of_w - expected[1]).abs().max() < 2**-8 * expected[1].abs().max()
    assert not torch.equal(of_w, expected[1])


@pytest.mark.usefixtures("_small_chunks")
def test_only_a_chunk_of_logits_is_there():
    x, w, target = case(16)
    with Largest(x, w) as seen:
        loss = linear_cross_entropy(x, w, target)
    # Two rows, with their padding.
    assert seen.num_elements == 2 * 304
    with Largest(x, w) as seen:
        torch.autograd.grad(loss, (x, w))
    assert seen.num_elements == w.numel()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "none"}, ValueError, "'mean' or 'sum', got 'none'"),
        (
            {"weight": torch.ones(0, 24)},
            ValueError,
            r"weight must be \[V, h\], both above 0, got \(0, 24\)",
        ),
        ({"weight": torch.ones(9, 5)}, ValueError, r"\[..., 5\] as weight says, got \(4, 24\)"),
        ({"target": torch.ones(5, dtype=torch.int64)}, ValueError, r"got \(5,\)"),
        ({"target": torch.ones(4)}, TypeError, "int64, got torch.float32"),
        ({"weight": torch.ones(9, 24).half()}, TypeError, "of one type, got torch.float32 and"),
        ({"target": torch.ones(4, device="meta").long()}, ValueError, "one device, got cpu, meta"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    x, w, target = case(4)
    arguments = {"hidden": x, "weight": w, "target": target} | change
    with pytest.raises(error, match=message):
        linear_cross_entropy(**arguments)


def test_a_backward_within_autocast_has_the_same_bits():
    hidden, weight = torch.randn(4, 6), torch.randn(9, 6)
    target, found = torch.arange(4), []
    for within in (False, True):
        leaves = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(leaves[0], leaves[1], target)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=within):
            found.append(torch.autograd.grad(loss, leaves))
    for outside, inside in zip(*found, strict=True):
        assert torch.equal(outside, inside)

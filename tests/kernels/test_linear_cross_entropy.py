import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.kernels import levels
from pykern.kernels import linear_cross_entropy as op
from pykern.kernels.gpu import linear_cross_entropy as gpu
from pykern.kernels.linear_cross_entropy import linear_cross_entropy
from pykern.runtime.split import backward_to_inputs
from tests.kernels.acceptance import Canaries, assert_accepted, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for_sm90

IGNORED = -100
WAYS = {"twin": op, "kernel": gpu}


@pytest.fixture
def _small_chunks(monkeypatch):
    """Two rows each, and the gradient of a weight in blocks of 128 rows."""
    monkeypatch.setattr(op, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(op, "_MOST_ROWS", 2)
    monkeypatch.setattr(op, "_BLOCK", 1)


class Rows:
    """Logits somewhere in memory that is NaN, with targets; and what they should become."""

    def __init__(self, values: Tensor, target: Tensor, padding: int, gap: int, offset: int) -> None:
        num_rows, self.num_classes = values.shape
        width = self.num_classes + padding
        self.room = values.new_full((offset + num_rows * (width + gap),), float("nan"))
        matrix = self.room[offset:].view(num_rows, width + gap)
        matrix[:, : self.num_classes] = values
        self.logits = matrix[:, :width]
        self._gaps = [matrix[:, width:], self.room[:offset]]
        self.target = target
        self._values = values.double()

    def check(self, losses: Tensor, log_sums: Tensor, scale: Tensor | None) -> None:
        values, target = self._values, self.target
        counts = target != IGNORED
        exact = values.logsumexp(1)
        one = F.one_hot(target.clamp(min=0), self.num_classes) * counts[:, None]
        own = (values * one).sum(1)
        roundings = 1 + exact.abs() + values.abs().amax(1)
        assert_accepted(log_sums, exact, roundings)
        assert_accepted(losses, (exact - own) * counts, roundings + own.abs())
        if scale is not None:
            softmax = (values - exact[:, None]).exp() * counts[:, None]
            gradients = (softmax - one) * scale.double()
            terms = (softmax * (roundings[:, None] + values.abs()) + one) * scale.double().abs()
            assert_accepted(self.logits[:, : self.num_classes], gradients, terms)
            assert not self.logits[:, self.num_classes :].any()
        else:
            assert torch.equal(self.logits[:, : self.num_classes].double(), values)
        assert all(gap.isnan().all() for gap in self._gaps)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=15)
@given(
    num_rows=st.integers(0, 4),
    num_classes=st.sampled_from([1, 2, 15, 16, 33, 70]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.integers(0, 20),
    gap=st.integers(0, 3),
    offset=st.integers(0, 3),
    deviation=st.sampled_from([0.01, 1.0, 30.0]),
    scale=st.sampled_from([None, 1.0, -0.37]),
    data=st.data(),
)
def test_rows_are_right(  # noqa: PLR0913, PLR0917 - what is drawn
    way, num_rows, num_classes, dtype, padding, gap, offset, deviation, scale, data
):
    labels = st.sampled_from([IGNORED, 0, num_classes - 1, num_classes // 2])
    target = torch.tensor(
        data.draw(st.lists(labels, min_size=num_rows, max_size=num_rows)), dtype=torch.int64
    )
    values = (torch.randn(num_rows, num_classes) * deviation).to(dtype)
    rows = Rows(values, target, padding, gap, offset)
    factor = None if scale is None else torch.tensor(scale)
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        if way == "kernel":
            patch.setattr(torch, "empty", canaries.empty)
            # More than one block in a row.
            patch.setattr(gpu, "_BLOCK", 32)
        losses, log_sums = WAYS[way].losses_of_rows(
            rows.logits, target, factor, num_classes, IGNORED
        )
    rows.check(losses, log_sums, factor)
    canaries.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_made_at_once_or_again(way, dtype):
    logits = torch.randn(5, 48).to(dtype)
    target = torch.tensor([3, IGNORED, 0, 46, 99])
    at_once, again, scale = logits.clone(), logits.clone(), torch.tensor(0.3)
    losses, log_sums = WAYS[way].losses_of_rows(at_once, target, scale, 47, IGNORED)
    WAYS[way].gradients_of_rows(again, log_sums, target, scale, 47, IGNORED)
    assert torch.equal(at_once.isnan(), again.isnan())
    assert torch.equal(at_once.nan_to_num(), again.nan_to_num())
    # A target that is no class shows, in its row alone.
    assert losses.isnan().tolist() == [False] * 4 + [True]
    assert at_once[:, :47].isnan().all(1).tolist() == [False] * 4 + [True]
    assert not at_once[:4].isnan().any()


@pytest.mark.parametrize("way", WAYS)
def test_logits_may_be_infinite(way):
    logits = torch.full((2, 40), float("-inf"))
    logits[0, 35] = 2.0
    # NumPy, which interprets the kernel, warns.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(gpu, "_BLOCK", 16)
        losses, log_sums = WAYS[way].losses_of_rows(
            logits, torch.tensor([35, 0]), torch.tensor(1.0), 40, IGNORED
        )
    assert log_sums.tolist() == [2.0, float("-inf")]
    assert losses[0] == 0
    assert losses[1].isnan()
    assert not logits[0].any()


def exactly(x: Tensor, w: Tensor, target: Tensor, reduction: str = "mean") -> list[Tensor]:
    """Loss and gradients in float64."""
    x, w = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    loss = F.cross_entropy(x @ w.T, target, reduction=reduction, ignore_index=IGNORED)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w))]


def case(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_rows, 24).to(dtype).requires_grad_()
    w = torch.randn(301, 24).to(dtype).requires_grad_()
    target = torch.randint(301, (num_rows,))
    target[1::4] = IGNORED
    return x, w, target


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
    for level, bytes_per_row in (("ops", 24 * 2 + 4), ("none", 24 * 2 + 4 + 304 * 2)):
        saved: list[Tensor] = []
        with (
            levels.keeping(level),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, s=saved: s.append(t) or t, lambda t: t
            ),
        ):
            loss = linear_cross_entropy(x, w, target)
        kept = {t.data_ptr(): t for t in saved if t is not None and t.dim() > 0}
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
    with pytest.raises(RuntimeError, match="no second derivative"):
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


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, beside memory that is known."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    size = storage.nbytes() // tensor.itemsize
                    self.num_elements = max(self.num_elements, size)
        return result


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
        ({"weight": torch.ones(0, 24)}, ValueError, r"\[V, h\], neither 0, got \(0, 24\)"),
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


def test_torch_accepts_the_operations():
    logits, target, scale = torch.randn(3, 16), torch.tensor([1, 4, IGNORED]), torch.tensor(0.5)
    operations = torch.ops.pykern
    for factor in (None, scale):
        arguments = (logits.clone(), target, factor, 11, IGNORED)
        torch.library.opcheck(operations.cross_entropy_losses.default, arguments)
    arguments = (logits.clone(), torch.randn(3), target, scale, 11, IGNORED)
    torch.library.opcheck(operations.cross_entropy_gradients.default, arguments)


FAR_ROWS = """
import torch
from pykern.kernels.gpu import linear_cross_entropy as gpu
room = torch.empty(2**31 + 64, dtype=torch.float16)
logits = room.as_strided((2, 33), (2**31 + 16, 1))
values = torch.randn(2, 33).half()
logits.copy_(values)
near, target, scale = values.clone(), torch.tensor([2, 32]), torch.tensor(1.0)
of_far = gpu.losses_of_rows(logits, target, scale, 33, -100)
of_near = gpu.losses_of_rows(near, target, scale, 33, -100)
assert torch.equal(logits, near)
assert all(map(torch.equal, of_far, of_near))
"""


def test_rows_may_lie_beyond_32_bits():
    subprocess.run([sys.executable, "-c", FAR_ROWS], check=True)


LAUNCHES = """
import torch
from pykern.kernels.gpu import linear_cross_entropy as gpu
scale, target = torch.tensor(1.0), torch.zeros(4, dtype=torch.int64)
logits = torch.empty(4, 50272)
gpu.losses_of_rows(logits, target, scale, 50257, -100)
logits = logits.bfloat16()
_, log_sums = gpu.losses_of_rows(logits, target, None, 50257, -100)
gpu.losses_of_rows(logits, target, scale, 50257, -100)
gpu.gradients_of_rows(logits, log_sums, target, scale, 50257, -100)
"""


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    launches = [(32, 1, 1), (16, 1, 0), (16, 1, 1), (16, 0, 1)]
    for kernel, (bits, losses, gradients) in zip(kernels, launches, strict=True):
        assert kernel.spills == 0
        loads, stores = kernel.accesses("LDG"), kernel.accesses("STG")
        # 16 elements of a row at once, in each pass; the row's label, sums and scale besides.
        passes = loads.pop(128) * 128 // bits // 16
        assert sum(loads.values()) <= 3
        assert stores.pop(128, 0) * 128 // bits // 16 == gradients
        assert sum(stores.values()) == 2 * losses
        assert passes == losses + gradients
        assert kernel.num_instructions / (16 * passes) < 30

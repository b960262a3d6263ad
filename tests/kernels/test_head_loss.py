from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.kernels.head_loss import LazyLogits, LinearCrossEntropy, WithGradients
from tests.kernels.head_cases import IGNORED, Largest, case, cut_small, exactly


@pytest.fixture
def _small_chunks(monkeypatch):
    cut_small(monkeypatch)


def at_once(loss_fn: LinearCrossEntropy, output: Any, target: Tensor, share: float) -> Tensor:
    """Loss and backward of a microbatch as a pipeline does them."""
    ended = loss_fn.with_gradients(output, target, share)
    assert isinstance(ended, WithGradients)
    if ended.outputs:
        torch.autograd.backward(ended.outputs, ended.gradients)
    return ended.loss


def one_by_one(loss_fn: LinearCrossEntropy, output: Any, target: Tensor, share: float) -> Tensor:
    loss = loss_fn(output, target)
    (loss * share).backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_chunk_has_the_bits_of_an_ordinary_backward(dtype, reduction):
    loss_fn = LinearCrossEntropy(reduction=reduction)
    x, w, _ = case(12, dtype)
    target = torch.randint(301, (3, 4))
    target[0, 1] = IGNORED
    found = []
    for way in (at_once, one_by_one):
        leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        losses = [
            way(loss_fn, LazyLogits((leaf * factor).view(3, 4, 24), weight), target, 0.3)
            for factor in (1.0, 0.5, 2.0)
        ]
        found.append((*losses, leaf.grad, weight.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_small_chunks")
def test_several_chunks_are_right():
    x, w, target = case(9)
    w.grad = torch.ones_like(w)
    exact = exactly(x, w, target)
    loss = at_once(LinearCrossEntropy(), LazyLogits(x, w), target, 0.5)
    assert x.grad is not None
    for found, expected in zip((loss * 0.5, x.grad, w.grad - 1), exact, strict=True):
        torch.testing.assert_close(found.double(), expected * 0.5, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_small_chunks")
def test_there_is_neither_a_second_gradient_nor_more_than_a_chunk():
    x, w, target = case(16)
    w.grad = torch.zeros_like(w)
    with Largest(x, w, w.grad) as seen:
        at_once(LinearCrossEntropy(), LazyLogits(x, w), target, 1.0)
    # A block of the weight's gradient; a chunk is smaller.
    assert seen.num_elements == 128 * 24 > 2 * 304


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("where", ["main_grad", "grad_dtype", "autocast"])
def test_gradients_collect_in_float32(where):
    x, w, target = case(8, torch.bfloat16)
    exact = exactly(x, w, target)[2]
    (of_torch,) = torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), w)
    weight: Any = nn.Parameter(w.detach().float() if where == "autocast" else w.detach())
    if where == "main_grad":
        weight.main_grad = torch.zeros(weight.shape)
    elif where == "grad_dtype":
        if not hasattr(weight, "grad_dtype"):
            pytest.skip("this torch has no grad_dtype")
        weight.grad_dtype = torch.float32
    hidden = x.detach().float() if where == "autocast" else x.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "autocast"):
        for _ in range(3):
            at_once(LinearCrossEntropy(), LazyLogits(hidden, weight), target, 1.0)
    found = weight.main_grad if where == "main_grad" else weight.grad
    assert (weight.grad is None) == (where == "main_grad")
    assert found is not None
    assert found.dtype == torch.float32
    assert (found / 3 - exact).norm() <= 2 * (of_torch - exact).norm()
    # Three times the same: nothing has been rounded to bfloat16 on the way.
    assert (found - found.bfloat16()).norm() > 2**-11 * found.norm()
    once: Any = nn.Parameter(w.detach())
    once.main_grad = torch.zeros(once.shape)
    at_once(LinearCrossEntropy(), LazyLogits(x.detach(), once), target, 1.0)
    torch.testing.assert_close(found, once.main_grad * 3)


def test_a_wrong_main_grad_is_refused():
    x, w, target = case(2)
    w.main_grad = torch.zeros(3)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"float32 \(301, 24\), got torch.float32 \(3,\)"):
        LinearCrossEntropy().with_gradients(LazyLogits(x, w), target, 1.0)


def test_what_is_frozen_gets_no_gradient():
    x, w, target = case(5)
    loss_fn = LinearCrossEntropy()
    at_once(loss_fn, LazyLogits(x, w), target, 1.0)
    frozen = x.detach().requires_grad_()
    at_once(loss_fn, LazyLogits(frozen, w.detach()), target, 1.0)
    weight = w.detach().requires_grad_()
    ended = loss_fn.with_gradients(LazyLogits(x.detach(), weight), target, 1.0)
    assert ended is not None
    assert ended.outputs == ()
    for found, expected in ((frozen.grad, x.grad), (weight.grad, w.grad)):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def hooked(register: str) -> Any:
    weight: Any = nn.Parameter(torch.randn(301, 24))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    if register == "tensor":
        weight.register_hook(lambda g: g)
    elif register == "accumulated":
        weight.register_post_accumulate_grad_hook(lambda _: None)
    elif register == "node":
        node.register_hook(lambda *_: None)
    else:
        node.register_prehook(lambda g: g)
    # torch forgets a node that nothing holds.
    weight.node = node
    return weight


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *(
            ((lambda r=register: hooked(r)), "has hooks")
            for register in ("tensor", "accumulated", "node", "node before")
        ),
        (lambda: torch.randn(301, 24, requires_grad=True) * 2, "computed from something else"),
        (lambda: torch.randn(301, 24).as_subclass(Other), "is a Other"),
    ],
)
def test_some_weights_need_an_ordinary_backward(make, reason):
    x, _, target = case(3)
    output, loss_fn = LazyLogits(x, make()), LinearCrossEntropy()
    obstacle = loss_fn.obstacle(output)
    assert obstacle is not None
    assert reason in obstacle
    assert loss_fn.with_gradients(output, target, 1.0) is None
    loss_fn(output, target).backward()
    assert x.grad is not None


def test_without_gradients_nothing_is_done():
    x, w, target = case(3)
    loss_fn = LinearCrossEntropy()
    with torch.no_grad():
        assert loss_fn.with_gradients(LazyLogits(x, w), target, 1.0) is None
    output = LazyLogits(x.detach(), w.detach())
    assert loss_fn.with_gradients(output, target, 1.0) is None
    assert w.grad is None


def test_hooks_that_are_gone_do_not_stand_in_the_way():
    weight = nn.Parameter(torch.randn(4, 2))
    weight.register_hook(lambda g: g).remove()
    output = LazyLogits(torch.randn(3, 2), weight)
    assert LinearCrossEntropy().obstacle(output) is None
    assert LinearCrossEntropy().obstacle(output) is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_logits_are_taken_as_well(reduction):
    loss_fn = LinearCrossEntropy(ignore_index=2, reduction=reduction)
    logits, target = torch.randn(2, 3, 5).bfloat16(), torch.tensor([[0, 1, 2], [3, 4, 2]])
    expected = F.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), ignore_index=2, reduction=reduction
    )
    assert torch.equal(loss_fn(logits, target), expected)
    assert loss_fn.with_gradients(logits, target, 1.0) is None


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="'mean' or 'sum', got 'none'"):
        LinearCrossEntropy(reduction="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("output", [None, {"hidden": 1, "weight": 2}, (1, 2), (torch.ones(2, 3),)])
def test_what_is_no_output_of_a_head_is_named(output):
    loss, target = LinearCrossEntropy(), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match=f"got a {type(output).__name__}"):
        loss(output, target)
    with pytest.raises(TypeError, match=f"got a {type(output).__name__}"):
        loss.with_gradients(output, target, 1.0)

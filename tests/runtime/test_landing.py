"""Taking the gradient of a leaf leaves no trace on it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pykern
from pykern._C import collect
from pykern.budget.live_bytes import LiveBytes
from pykern.kernels.head_loss import WithGradients
from pykern.torch_private import WHOLE, run_backward


def leaf_of(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def gradients_of(loss: Tensor, *leaves: Tensor) -> Sequence[Tensor | None]:
    found = collect(run_backward, WHOLE, (loss,), (torch.ones_like(loss),), leaves)
    assert found is not None
    return found


def test_a_gradient_lands_instead_of_in_grad() -> None:
    leaf = leaf_of(2, 3)
    (gradient,) = gradients_of((leaf * 3).sum(), leaf)
    assert gradient is not None
    assert gradient.tolist() == [[3.0] * 3] * 2
    assert leaf.grad is None
    assert leaf.requires_grad
    assert leaf._backward_hooks is None
    (leaf * 3).sum().backward()
    assert leaf.grad is not None


def test_a_gradient_that_does_not_come_is_none() -> None:
    leaf, other = leaf_of(2), leaf_of(2)
    found = gradients_of(other.sum(), leaf, other)
    assert found[0] is None
    assert found[1] is not None
    assert leaf._backward_hooks is None


def test_hooks_of_layers_come_first_and_stay() -> None:
    leaf = leaf_of(2)
    handle = leaf.register_hook(lambda gradient: gradient * 10)
    (gradient,) = gradients_of(leaf.sum(), leaf)
    assert gradient is not None
    assert gradient.tolist() == [10.0, 10.0]
    assert leaf._backward_hooks is not None
    assert len(leaf._backward_hooks) == 1
    handle.remove()


@pytest.mark.parametrize("outputs", [0, 1])
def test_nothing_runs_where_an_output_has_no_gradient(outputs: int) -> None:
    leaf = leaf_of(2)
    given = (leaf.sum(),) * outputs
    assert collect(run_backward, WHOLE, given, (None,) * outputs, (leaf,)) is None
    assert leaf._backward_hooks is None


def test_a_failed_backward_leaves_all_leaves_as_they_were() -> None:
    leaves = [leaf_of(2) for _ in range(3)]

    def fail(gradient: Tensor) -> None:
        raise ValueError("no")

    middle = leaves[0] * 2
    middle.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        gradients_of((middle + leaves[1] + leaves[2]).sum(), *leaves)
    for leaf in leaves:
        assert leaf.requires_grad
        assert leaf._backward_hooks is None
        assert leaf.grad is None


def test_leaves_are_restored_where_one_is_no_tensor() -> None:
    leaf = leaf_of(2)
    with pytest.raises(AttributeError):
        collect(run_backward, WHOLE, (leaf.sum(),), (torch.ones(()),), (leaf, 1))  # type: ignore[arg-type]
    assert leaf._backward_hooks is None


def test_a_backward_leaves_nothing_that_holds_its_leaves() -> None:
    leaf = leaf_of(2)
    gradients_of(leaf.sum(), leaf)
    gone = weakref.ref(leaf)
    gc.disable()
    try:
        del leaf
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("arguments", [(), (run_backward, WHOLE, (), (), 1)])
def test_it_takes_five_arguments_of_its_kinds(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="collect takes"):
        collect(*arguments)


def test_gradients_that_a_loss_brings_are_looked_at_by_torch() -> None:
    """The engine alone would add up a gradient that can be summed to the shape."""

    class Wrong:
        def __call__(self, output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target)

        def with_gradients(
            self, output: Tensor, target: Tensor, share: float | Tensor
        ) -> WithGradients:
            del share
            loss = F.mse_loss(output, target).detach()
            return WithGradients(loss, (output,), (torch.ones(5, *output.shape),))

    model = nn.Sequential(nn.Linear(3, 3))
    pipe = pykern.Pipeline(
        model, devices="cpu:1", schedule="gpipe", microbatches=2, loss_fn=Wrong()
    )
    with pipe, pytest.raises(RuntimeError, match="Mismatch in shape"):
        pipe.step(torch.randn(4, 3), target=torch.randn(4, 3))


@pytest.mark.parametrize("fake", [False, True])
def test_gradients_that_share_memory_are_copied_also_where_they_have_no_values(fake: bool) -> None:
    """An estimate has to count the copies that a step makes."""
    with FakeTensorMode() if fake else nullcontext():
        leaves = [torch.randn(2, 3, 4, requires_grad=True) for _ in range(3)]
        alone = torch.randn(2, 3, requires_grad=True)
        joined = torch.cat(leaves, -1) @ torch.randn(12, 5)
        loss = joined.sum() + (alone @ torch.randn(3, 3)).sum()
        live = LiveBytes()

        def engine(*given: Any) -> None:
            run_backward(*given)
            live.__enter__()

        found = collect(engine, WHOLE, (loss,), (torch.ones_like(loss),), (*leaves, alone))
        try:
            # A view has the memory from a first element to a last, with all that lies between; the
            # last view has the memory to itself by then.
            assert live.now == 2 * 4 * (5 * 12 + 4)
        finally:
            live.__exit__(None, None, None)
        assert found is not None
        assert all(gradient is not None for gradient in found)

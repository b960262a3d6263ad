"""Taking the gradient of a leaf leaves no trace on it."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pykern
from pykern._C import Landing
from pykern.budget.live_bytes import LiveBytes
from pykern.kernels.head_loss import WithGradients
from pykern.runtime.autograd.landing import take


def leaf_of(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_gradient_lands_instead_of_in_grad() -> None:
    leaf = leaf_of(2, 3)
    landing = Landing(leaf)
    (leaf * 3).sum().backward()
    gradient = landing.take()
    assert gradient is not None
    assert gradient.tolist() == [[3.0] * 3] * 2
    assert leaf.grad is None
    assert leaf.requires_grad
    assert leaf._backward_hooks is None
    (leaf * 3).sum().backward()
    assert leaf.grad is not None


def test_a_gradient_that_does_not_come_is_none() -> None:
    leaf = leaf_of(2)
    assert Landing(leaf).take() is None
    assert leaf._backward_hooks is None


def test_hooks_of_layers_come_first_and_stay() -> None:
    leaf = leaf_of(2)
    handle = leaf.register_hook(lambda gradient: gradient * 10)
    landing = Landing(leaf)
    leaf.sum().backward()
    gradient = landing.take()
    assert gradient is not None
    assert gradient.tolist() == [10.0, 10.0]
    assert leaf._backward_hooks is not None
    assert len(leaf._backward_hooks) == 1
    handle.remove()


def test_one_that_is_never_taken_can_be_collected() -> None:
    leaf = leaf_of(2)
    Landing(leaf)
    gone = weakref.ref(leaf)
    del leaf
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("arguments", [(), (1, 2)])
def test_it_is_made_of_one_leaf_and_called_with_one_gradient(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        Landing(*arguments)
    with pytest.raises(TypeError):
        Landing(leaf_of(1))(*arguments)
    with pytest.raises(AttributeError):
        Landing(1)  # type: ignore[arg-type]


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
        landings = [Landing(leaf) for leaf in (*leaves, alone)]
        joined = torch.cat(leaves, -1) @ torch.randn(12, 5)
        (joined.sum() + (alone @ torch.randn(3, 3)).sum()).backward()
        live = LiveBytes()
        with live:
            found = [take(landing) for landing in landings]
            # A view has the memory from a first element to a last, with all that lies between; the
            # last view has the memory to itself by then.
            assert live.now == 2 * 4 * (5 * 12 + 4)
        assert all(gradient is not None for gradient in found)

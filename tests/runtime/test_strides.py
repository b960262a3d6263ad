"""Gradients that are not laid out like the activation go from stage to stage as they come.

Sums of them round by the order in which their elements lie in memory, so that what is laid out
anew at a cut differs from the plain model.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from pykern.runtime.autograd.landing import collect
from pykern.runtime.loss import Losses
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.stage.stage import Stage
from pykern.runtime.stage.transport import connect
from pykern.tensors.strides import copy_of, span
from pykern.torch_private import WHOLE, run_backward
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.plans import two_replicas
from tests.runtime.strided_models import MODELS, Call, cuts, inputs, loss_of
from tests.support.comparison import (
    assert_all_have_gradients,
    assert_same_gradients,
    assert_same_state,
)
from tests.support.plain_step import by_microbatch, rows_of

NUM_MICROBATCHES = 3

FORMS: dict[str, tuple[str, Any]] = {
    "1f1b": ("one_f_one_b", None),
    "zb": ("zb_h1", None),
    "1f1b by layer": ("one_f_one_b", "layer"),
    "zb by stage": ("zb_h1", "stage"),
}


def plain_step(model: nn.Module, x: Tensor, num_replicas: int = 1) -> Tensor:
    rows = rows_of(len(x), NUM_MICROBATCHES)
    parts = x.split(rows)
    return by_microbatch(model, rows, lambda index, _: loss_of(model(parts[index])), num_replicas)


def check(
    model: nn.Sequential, plan: Plan, devices: Any, balance: Sequence[int], **options: Any
) -> None:
    """Two steps of AdamW, the losses, gradients, parameters and buffers of each."""
    captures = options.get("capture", False)
    # Replays are for microbatches of the same size.
    plain, x = copy.deepcopy(model), inputs()[: 2 * NUM_MICROBATCHES if captures else None]
    with pykern.Pipeline(
        model, devices=devices, schedule=plan, loss_fn=loss_of, balance=balance, **options
    ) as pipe:
        optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (pipe, plain)]
        for _ in range(3 if captures else 2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = plain_step(plain, x, plan.placement.num_replicas)
            assert torch.equal(pipe.step(x), expected), balance
            assert_same_state(pipe, plain)
            for optimizer in optimizers:
                optimizer.step()
            for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), balance


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_every_cut_equals_the_plain_model(model: str, form: str) -> None:
    name, recompute = FORMS[form]
    made = MODELS[model]()
    for balance in cuts(len(made)):
        plan = schedules.by_name[name](len(balance), NUM_MICROBATCHES)
        check(copy.deepcopy(made), plan, f"cpu:{len(balance)}", balance, recompute=recompute)


@pytest.mark.parametrize("model", sorted(MODELS.keys() - {"channels last"}))
def test_replicas_equal_the_plain_model(model: str) -> None:
    made = MODELS[model]()
    plan = two_replicas(2, NUM_MICROBATCHES)
    for first in range(1, len(made)):
        check(copy.deepcopy(made), plan, "cpu:2", [first, len(made) - first])


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_cut_on_gpus_equals_the_plain_model(
    gpus: FakeCuda, model: str, capture: bool
) -> None:
    made = MODELS[model]()
    balance = [1] * len(made)
    devices = [f"cuda:{number % 8}" for number in range(len(made))]
    plan = schedules.by_name["zb_h1" if capture else "one_f_one_b"](len(made), NUM_MICROBATCHES)
    check(made, plan, devices, balance, capture=capture)


class Shift(nn.Module):
    """Adds a parameter; the graph reaches both by way of views of one memory."""

    def __init__(self, view_first: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4, 3))
        self._view_first = view_first

    def forward(self, x: Tensor) -> Tensor:
        if self._view_first:
            shift = self.shift.view(1, 4, 3)
            return x.view(1, 4, 3) + shift
        return x + self.shift.view(1, 4, 3)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("view_first", [False, True])
def test_a_gradient_that_waits_is_not_written_by_later_microbatches(
    split: bool, view_first: bool
) -> None:
    """For microbatches of one row the gradients of a shift and of what it shifts are the same."""
    layers = nn.Sequential(nn.Linear(3, 3), Shift(view_first))
    plain = copy.deepcopy(layers)
    first, last = stages = [Stage(0, [layers[0]]), Stage(1, [layers[1]])]
    connect(stages)
    x = torch.randn(2, 1, 4, 3)
    for number in range(2):
        loss_of(plain(x[number])).backward()
    losses = Losses(loss_of, None, [1.0, 1.0])
    for stage in stages:
        stage.begin(2, StepSeed(), losses)
    first.enter([(x[0],), (x[1],)])
    for number in range(2):
        first.forward(number)
        last.forward(number)
    # The first stage is late.
    for number in range(2):
        if split:
            last.input_gradients(number)
        else:
            last.backward(number)
    for number in range(2 if split else 0):
        last.weight_gradients(number)
    for number in range(2):
        first.backward(number)
    assert_same_gradients(layers, plain)
    assert_all_have_gradients(plain)


def test_hooks_that_layers_have_put_on_their_input_change_its_gradient() -> None:
    given: list[Tensor] = []

    def doubled(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
            given.append(x)
        return x.t()

    model = nn.Sequential(
        nn.Linear(3, 3), Call(doubled), Call(lambda x: x.exp().t()), nn.Linear(3, 3)
    )
    plain = copy.deepcopy(model)
    x = torch.randn(6, 3)
    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=1, loss_fn=loss_of, balance=[1, 3]
    ) as pipe:
        pipe.step(x)
        loss_of(plain(x)).backward()
        assert_same_state(pipe, plain)
    assert given[0].requires_grad
    assert len(given[0]._backward_hooks or ()) == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(3, 1).expand(3, 4),
        torch.randn(5, 6, 7)[1:3, ::2, 3],
        torch.randn(()).expand(2, 2),
        torch.randn(8).unfold(0, 4, 2),
        torch.randn(3, 0, 2).transpose(0, 2),
        torch.randn(3, 4, dtype=torch.complex64).t().conj(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} in {tensor.stride()}",
)
def test_a_copy_has_the_strides_and_memory_of_its_own(tensor: Tensor) -> None:
    before = tensor.clone()
    copied = copy_of(tensor)
    assert torch.equal(copied, before)
    assert copied.stride() == tensor.stride() or copied.numel() == 0
    assert copied.numel() == 0 or copied.data_ptr() != tensor.data_ptr()
    assert copied.untyped_storage().nbytes() == span(tensor) * tensor.element_size()


def test_a_gradient_in_memory_of_its_own_is_not_copied() -> None:
    """Nor is a view of it, as a product's is."""
    for function in (torch.exp, lambda x: x.t().exp(), lambda x: x.view(2, 6).exp()):
        leaf = torch.randn(3, 4, requires_grad=True)
        addresses: list[int] = []
        leaf.register_hook(lambda gradient, to=addresses: to.append(gradient.data_ptr()))
        loss = function(leaf).sum()
        found = collect(run_backward, WHOLE, (loss,), (torch.ones(()),), (leaf,))
        assert found is not None
        (gradient,) = found
        assert gradient is not None
        assert [gradient.data_ptr()] == addresses
        assert leaf.grad is None
        assert leaf.requires_grad


def test_a_group_norm_of_channels_last_values_is_split() -> None:
    """Asked for the gradients of its parameters alone, torch's ends the process."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1), nn.GroupNorm(4, 4)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plan = schedules.zb_h1(2, NUM_MICROBATCHES)
    check(model, plan, "cpu:2", [2, 2])

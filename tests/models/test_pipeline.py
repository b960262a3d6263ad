"""A pipeline of any of the models has the bits of the plain loop over its layers."""

import copy

import pytest
import torch
from torch import Tensor

import pykern
from pykern.kernels.head_loss import LinearCrossEntropy
from pykern.pipeline.choose_levels import RecomputeArgument
from tests.models.cases import case
from tests.runtime.untied import Untied
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step, rows_of

SCHEDULES = ["one_f_one_b", "zb_h1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "moe"])
def test_every_bit_is_the_plain_loop_s(name, num_devices, schedule):
    ours = case(name, rows=5, dropout=0.3)
    plain = copy.deepcopy(ours.model)
    with pykern.Pipeline(
        ours.model,
        devices=f"cpu:{num_devices}",
        schedule=schedule,
        microbatches=4,
        loss_fn=ours.loss_fn,
    ) as pipe:
        for _ in range(2):
            stages = pipe.partition.stages
            expected = plain_step(plain, ours.ids, ours.target, ours.loss_fn, 4, stages)
            assert torch.equal(pipe.step(ours.ids, target=ours.target), expected)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "moe"])
def test_recompute_changes_no_bit(name):
    """Not of dropout, of the choice of experts, or of the loss of balance."""
    expected = trained(name, "none")
    others: list[RecomputeArgument] = ["ops", ["layer", "stage"]]
    for recompute in others:
        for ours, theirs in zip(trained(name, recompute), expected, strict=True):
            assert torch.equal(ours, theirs)


def trained(name: str, recompute: RecomputeArgument) -> list[Tensor]:
    """Losses of two steps, and the gradients that they leave."""
    torch.manual_seed(5)
    ours = case(name, rows=5, dropout=0.3)
    with pykern.Pipeline(
        ours.model,
        devices="cpu:2",
        schedule="zb_h1",
        microbatches=4,
        loss_fn=ours.loss_fn,
        recompute=recompute,
    ) as pipe:
        losses = [pipe.step(ours.ids, target=ours.target) for _ in range(2)]
        gradients = [parameter.grad for parameter in pipe.parameters()]
    return losses + [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_a_loss_without_logits_has_its_own_loop_s_bits(name, schedule):
    ours = case(name, rows=5, fused_loss=True)
    plain = copy.deepcopy(ours.model)
    expected = torch.zeros(())
    rows = rows_of(5, 4)
    for x, y in zip(ours.ids.split(rows), ours.target.split(rows), strict=True):
        share = len(x) / 5
        ended = LinearCrossEntropy().with_gradients(plain(x), y, share)
        assert ended is not None
        torch.autograd.backward(ended.outputs, ended.gradients)
        expected += ended.loss * share
    with pykern.Pipeline(
        ours.model, devices="cpu:3", schedule=schedule, microbatches=4, loss_fn=ours.loss_fn
    ) as pipe:
        assert torch.equal(pipe.step(ours.ids, target=ours.target), expected)
        assert_same_state(pipe, plain)


@pytest.mark.parametrize(("num_devices", "schedule"), [(1, "zb_h1"), (2, "zb_h1"), (4, "gpipe")])
def test_a_tied_head_has_a_sum_of_its_own(num_devices, schedule):
    ours = case("gpt tied", rows=5, dropout=0.3)
    with pykern.Pipeline(
        ours.model,
        devices=f"cpu:{num_devices}",
        schedule=schedule,
        microbatches=4,
        loss_fn=ours.loss_fn,
    ) as pipe:
        untied = Untied(ours.model, pipe.partition.stages)
        assert untied.num_shared == (num_devices > 1)
        for _ in range(2):
            stages = pipe.partition.stages
            expected = untied.step(ours.ids, ours.target, ours.loss_fn, 4, stages)
            assert torch.equal(pipe.step(ours.ids, target=ours.target), expected)
            untied.require_same()


@pytest.mark.parametrize("fused_loss", [False, True])
def test_a_tied_model_trains_alike_over_stages(fused_loss):
    """Sums in another order: close, not the same."""
    curves = []
    for num_devices in (1, 3):
        torch.manual_seed(5)
        ours = case("gpt tied", rows=8, fused_loss=fused_loss)
        devices = f"cpu:{num_devices}"
        with pykern.Pipeline(
            ours.model, devices=devices, microbatches=4, loss_fn=ours.loss_fn
        ) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
            losses = []
            for _ in range(12):
                optimizer.zero_grad()
                losses.append(pipe.step(ours.ids, target=ours.target).item())
                optimizer.step()
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[1][-1] < curves[1][0] - 0.2


def curve(recompute: RecomputeArgument) -> list[float]:
    """Losses of some steps of AdamW with dropout."""
    torch.manual_seed(5)
    ours = case("gpt", rows=8, dropout=0.1)
    with pykern.Pipeline(
        ours.model, devices="cpu:2", microbatches=4, loss_fn=ours.loss_fn, recompute=recompute
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses = []
        for _ in range(12):
            optimizer.zero_grad()
            losses.append(pipe.step(ours.ids, target=ours.target).item())
            optimizer.step()
    return losses


def test_levels_train_alike():
    expected = curve("none")
    assert expected[-1] < expected[0] - 0.2
    for recompute in ("ops", "layer", "stage"):
        assert curve(recompute) == expected
    # Gradients through 8 bits: close, not the same.
    stashed = curve("ops+stash")
    assert stashed != expected
    assert stashed == pytest.approx(expected, rel=0.01)

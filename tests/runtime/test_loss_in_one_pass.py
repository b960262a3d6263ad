"""Pipelines whose loss does its part of the backward at once: pykern.kernels.head_loss."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.kernels import linear_cross_entropy as op
from pykern.kernels.head_loss import LazyLogits, LinearCrossEntropy, WithGradients
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step, rows_of

WIDTH, VOCABULARY, NUM_MICROBATCHES = 12, 301, 4
NAMES = ["one_f_one_b", "gpipe", "interleaved", "zb_h1", "zb_v", "chimera"]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, x: Tensor) -> LazyLogits | Tensor:
        hidden = self.norm(x)
        if self.training and torch.is_grad_enabled():
            return LazyLogits(hidden, self.weight)
        return F.linear(hidden, self.weight)


class Counting(LinearCrossEntropy):
    """Counts microbatches whose backward was done at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def with_gradients(
        self, output: Any, target: Tensor, share: float | Tensor
    ) -> WithGradients | None:
        ended = super().with_gradients(output, target, share)
        self.count += ended is not None
        return ended


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)), Head())


def batch(rows: int = 10) -> tuple[Tensor, Tensor]:
    target = torch.randint(VOCABULARY, (rows, 3))
    target[:, 1] = -100
    return torch.randn(rows, 3, WIDTH), target


def pipeline(
    layers: nn.Sequential, plan: Plan, loss_fn: Callable[..., Tensor], **options: Any
) -> pykern.Pipeline:
    options.setdefault("devices", f"cpu:{plan.num_devices}")
    return pykern.Pipeline(layers, schedule=plan, loss_fn=loss_fn, **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_equals_the_plain_model(name: str) -> None:
    plan = schedules.by_name[name](2, NUM_MICROBATCHES)
    layers, loss_fn = model(), Counting()
    plain = copy.deepcopy(layers)
    with pipeline(layers, plan, loss_fn) as pipe:
        # The second step adds to the gradients of the first.
        for rows in (10, 3):
            x, y = batch(rows)
            expected = plain_step(
                plain, x, y, LinearCrossEntropy(), 4, num_replicas=plan.placement.num_replicas
            )
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
        assert loss_fn.count == 4 + 3
        assert pipe(torch.randn(5, 3, WIDTH)).shape == (5, 3, VOCABULARY)


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "zb_h1"])
def test_several_chunks_have_the_bits_of_the_same_calls_in_a_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_FEWEST_ROWS", 2)
    layers, loss_fn = model(), LinearCrossEntropy()
    plain = copy.deepcopy(layers)
    x, y = batch()
    with pipeline(layers, schedules.by_name[name](2, NUM_MICROBATCHES), loss_fn) as pipe:
        for _ in range(2):
            loss = pipe.step(x, target=y)
            rows, total = rows_of(10, NUM_MICROBATCHES), torch.zeros(())
            for part, target in zip(x.split(rows), y.split(rows), strict=True):
                share = len(part) / len(x)
                ended = loss_fn.with_gradients(plain(part), target, share)
                assert ended is not None
                torch.autograd.backward(ended.outputs, ended.gradients)
                total += ended.loss * share
            assert torch.equal(loss, total)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("frozen", ["head", "others"])
def test_what_is_frozen_stays_without_gradient(frozen: str) -> None:
    layers, loss_fn = model(), Counting()
    chosen = layers[-1:] if frozen == "head" else layers[:-1]
    chosen.requires_grad_(False)
    if frozen == "others":
        layers[-1].norm.requires_grad_(False)
    plain = copy.deepcopy(layers)
    x, y = batch()
    for name in ("one_f_one_b", "zb_h1"):
        with pipeline(layers, schedules.by_name[name](2, NUM_MICROBATCHES), loss_fn) as pipe:
            expected = plain_step(plain, x, y, LinearCrossEntropy(), NUM_MICROBATCHES)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
    assert loss_fn.count == 2 * NUM_MICROBATCHES


@pytest.mark.parametrize("level", ["stage", "layer"])
def test_recomputed_microbatches_have_the_same_bits(level: Any) -> None:
    layers, loss_fn = model(), Counting()
    plain = copy.deepcopy(layers)
    # All of the first stage, and two microbatches of the last, of which the first is watched.
    recompute = [level, [level, None, level, None]]
    plan = schedules.gpipe(2, NUM_MICROBATCHES)
    with pipeline(layers, plan, loss_fn, recompute=recompute) as pipe:
        assert "1R0" in str(pipe.plan)
        assert "1R2" in str(pipe.plan)
        for _ in range(2):
            x, y = batch()
            expected = plain_step(plain, x, y, LinearCrossEntropy(), NUM_MICROBATCHES)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
    assert loss_fn.count == 0


def test_where_nothing_trains_a_step_is_refused() -> None:
    layers = model().requires_grad_(False)
    x, y = batch()
    with (
        pipeline(layers, schedules.one_f_one_b(2, NUM_MICROBATCHES), LinearCrossEntropy()) as pipe,
        pytest.raises(
            RuntimeError,
            match=r"the loss of microbatch .* must require grad, got one that depends on nothing "
            r"that trains",
        ),
    ):
        pipe.step(x, target=y)


def test_hooks_of_the_weight_are_called_for_each_microbatch() -> None:
    layers, loss_fn = model(), Counting()
    plain = copy.deepcopy(layers)
    calls: list[Tensor] = []
    layers[-1].weight.register_post_accumulate_grad_hook(calls.append)  # type: ignore[operator]
    x, y = batch()
    plan = schedules.zb_h1(2, NUM_MICROBATCHES)
    with pipeline(layers, plan, loss_fn) as pipe:
        expected = plain_step(plain, x, y, LinearCrossEntropy(), NUM_MICROBATCHES)
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)
    assert len(calls) == NUM_MICROBATCHES
    assert loss_fn.count == 0


@pytest.mark.parametrize("name", ["one_f_one_b", "chimera"])
def test_gradients_collect_in_main_grad(name: str) -> None:
    plan = schedules.by_name[name](2, NUM_MICROBATCHES)
    layers, loss_fn = model(), LinearCrossEntropy()
    plain = copy.deepcopy(layers)
    weight: Any = layers[-1].weight
    weight.main_grad = torch.zeros(VOCABULARY, WIDTH)
    x, y = batch()
    with pipeline(layers, plan, loss_fn) as pipe:
        pipe.step(x, target=y)
        plain_step(plain, x, y, loss_fn, 4, num_replicas=plan.placement.num_replicas)
        assert weight.grad is None
        assert torch.equal(weight.main_grad, plain[-1].weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("main", [False, True])
def test_graphs_have_the_same_bits(gpus: FakeCuda, name: str, main: bool) -> None:
    plan = schedules.by_name[name](2, NUM_MICROBATCHES)
    layers, loss_fn = model(), LinearCrossEntropy()
    plain = copy.deepcopy(layers)
    ours: Any = layers[-1].weight
    theirs: Any = plain[-1].weight
    with pipeline(layers, plan, loss_fn, devices=["cuda:0", "cuda:1"], capture=True) as pipe:
        for number in range(4):
            if main and number in (0, 3):
                for weight in (ours, theirs):
                    weight.main_grad = torch.zeros(VOCABULARY, WIDTH)
            x, y = batch(16)
            launched = gpus.calls("cuGraphLaunch")
            loss = pipe.step(x, target=y)
            # The graphs of the second step know nothing of another main_grad.
            assert (gpus.calls("cuGraphLaunch") == launched) == (
                number == 0 or (main and number == 3)
            )
            assert torch.equal(loss, plain_step(plain, x, y, loss_fn, 4, pipe.partition.stages))
            if main:
                theirs.main_grad += theirs.grad
                theirs.grad = None
                assert ours.grad is None
                torch.testing.assert_close(ours.main_grad, theirs.main_grad)
            else:
                assert_same_state(pipe, plain)


def test_graphs_keep_the_type_of_gradients(gpus: FakeCuda) -> None:
    layers, loss_fn = model().bfloat16(), LinearCrossEntropy()
    weight: Any = layers[-1].weight
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    weight.grad_dtype = torch.float32
    plain = copy.deepcopy(layers)
    theirs: Any = plain[-1].weight
    theirs.grad_dtype = torch.float32
    plan = schedules.one_f_one_b(2, NUM_MICROBATCHES)
    with pipeline(layers, plan, loss_fn, devices=["cuda:0", "cuda:1"], capture=True) as pipe:
        for _ in range(3):
            x, y = batch(16)
            pipe.step(x.bfloat16(), target=y)
            for part, target in zip(x.bfloat16().split(4), y.split(4), strict=True):
                ended = loss_fn.with_gradients(plain(part), target, 0.25)
                assert ended is not None
                torch.autograd.backward(ended.outputs, ended.gradients)
            assert weight.grad.dtype == torch.float32
            assert_same_state(pipe, plain)
        assert gpus.calls("cuGraphLaunch") > 0

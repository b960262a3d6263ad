"""The promise: loss, gradients and buffers equal the plain model's, bit for bit, on every
schedule."""

import contextlib
import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.diagonal import diagonal, nightly
from tests.runtime.models import CASES, Case
from tests.runtime.plans import split_backward, split_some, two_replicas
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# The first two update weights within a step (test_async.py), and no stage runs slices.
OTHERS = {"pipedream", "pipedream_2bw", "seq1f1b"}
SCHEDULES = sorted(schedules.by_name.keys() - OTHERS - {"forward_only"})

COUNTS = [(1, 2), (2, 5), (3, 4), (4, 8)]

# Forms of backward that no schedule has.
PLANS: dict[str, Callable[[int, int], Plan]] = {
    "split late": lambda p, m: split_backward(schedules.interleaved(p, m, num_chunks=2), delay=m),
    "split some": lambda p, m: split_some(schedules.hanayo(p, m, waves=1)),
    "replicas": two_replicas,
    "split replicas": lambda p, m: split_backward(two_replicas(p, m)),
}


def plans() -> dict[str, Plan]:
    """Every schedule and form at the counts that it takes."""
    found = {}
    for name in [*SCHEDULES, *PLANS]:
        make = PLANS.get(name) or schedules.by_name[name]
        for counts in COUNTS:
            with contextlib.suppress(ValueError):
                found[f"{name}-{counts[0]}-{counts[1]}"] = make(*counts)
    return found


PLANS_AT_COUNTS = plans()


def test_what_cannot_run_yet_is_refused() -> None:
    for name in OTHERS:
        with pytest.raises(ValueError, match=r"stages do not run|that stages run|got U actions"):
            CASES["mlp"](11).pipeline(schedules.by_name[name](2, 4))


@pytest.mark.parametrize(("name", "model"), diagonal(PLANS_AT_COUNTS, CASES))
def test_every_bit_equals_the_plain_model(name: str, model: str) -> None:
    plan = PLANS_AT_COUNTS[name]
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    num_replicas = plan.placement.num_replicas
    if num_replicas > 1 and model == "cnn":
        with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) has running statistics"):
            case.pipeline(plan)
        return
    with case.pipeline(plan) as pipe:
        # The second step adds to the gradients of the first, with another batch size; at times it
        # has rows for one replica only.
        for rows in (11, 1 if num_replicas > 1 else 3):
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(
                plain,
                x,
                y,
                case.loss_fn,
                plan.num_microbatches,
                pipe.partition.stages,
                num_replicas=num_replicas,
            )
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def counts_of_the_catalogue(*all_num_devices: int) -> list[tuple[int, int]]:
    return [(p, m) for p in all_num_devices for m in sorted({1, 2, p, 2 * p, 4 * p, 4 * p + 1})]


@pytest.mark.parametrize(
    ("counts", "at_least"),
    [(counts_of_the_catalogue(4), 3), nightly(counts_of_the_catalogue(1, 2, 3, 4, 8), 15)],
    ids=["few", "all"],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_at_every_count_with_frozen_stages_and_hooks(
    name: str, counts: list[tuple[int, int]], at_least: int
) -> None:
    num_plans = 0
    for num_devices, num_microbatches in counts:
        try:
            plan = schedules.by_name[name](num_devices, num_microbatches)
        except ValueError:
            continue
        num_plans += 1
        check_with_frozen_stages_and_hooks(plan)
    assert num_plans >= at_least


def check_with_frozen_stages_and_hooks(plan: Plan) -> None:
    """The first stage and one in the middle do not train; parameters of the others have hooks."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(plan.num_stages)))
    for frozen in {0, plan.num_stages // 2} - {plan.num_stages - 1}:
        layers[frozen].requires_grad_(False)
    plain = copy.deepcopy(layers)
    calls: Counter[str] = Counter()
    for model, whose in ((layers, "ours"), (plain, "theirs")):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 0.5)
                parameter.register_post_accumulate_grad_hook(
                    lambda _, whose=whose: calls.update([whose])
                )
    num_replicas = plan.placement.num_replicas
    x, y = torch.randn(2, plan.num_microbatches + 1, 4)
    case = Case(layers, x, y, F.mse_loss)
    with case.pipeline(plan) as pipe:
        expected = plain_step(
            plain, x, y, F.mse_loss, plan.num_microbatches, num_replicas=num_replicas
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        # Half of a sum is the sum of the halves, to the bit.
        assert_same_state(pipe, plain)
        assert num_replicas > 1 or calls["ours"] == calls["theirs"] > 0


@pytest.mark.parametrize(
    ("form", "model"), diagonal(["hanayo", "split late", "split replicas"], CASES)
)
def test_delays_change_nothing(form: str, model: str) -> None:
    """Actions that take a random time meet in another order in every step."""
    case = CASES[model](11)
    plan = PLANS[form](4, 5) if form in PLANS else schedules.by_name[form](4, 5)
    num_replicas = plan.placement.num_replicas
    if num_replicas > 1 and model == "cnn":
        return
    plain = copy.deepcopy(case.layers)
    delays = random.Random(7)
    for layer in case.layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(delays.uniform(0, 0.001)))
    with case.pipeline(plan) as pipe:
        for _ in range(4):
            stages = pipe.partition.stages
            expected = plain_step(
                plain, case.inputs, case.target, case.loss_fn, 5, stages, num_replicas=num_replicas
            )
            assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)


class Twice(nn.Module):
    """Returns the same tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


class Mix(nn.Module):
    """Uses the first of two more than once, and works in place on it if told to."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x = F.relu(pair[0], inplace=True) if self.inplace else pair[0]
        return x * 1.3 + pair[1].tanh() * x + (x * pair[1]).sin()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tensor_that_is_handed_over_twice_stays_one(inplace: bool) -> None:
    layers = nn.Sequential(Twice(), Mix(inplace=inplace), Twice(), Mix(inplace=inplace))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(9, 8), torch.randn(9, 8)
    with pykern.Pipeline(
        layers, devices="cpu:4", microbatches=4, loss_fn=F.mse_loss, balance="layers"
    ) as pipe:
        for _ in range(3):
            expected = plain_step(plain, x, y, F.mse_loss, 4)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def test_a_layer_may_become_one_that_works_in_place() -> None:
    block = nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
    layers = nn.Sequential(nn.Linear(8, 8), block)
    plain = copy.deepcopy(layers)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss) as pipe:
        for change in (nn.ReLU(), nn.ReLU(inplace=True)):
            expected = plain_step(plain, x, y, F.mse_loss, 2)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
            for model in (layers, plain):
                model.get_submodule("1").register_module("0", change)
        expected = plain_step(plain, x, y, F.mse_loss, 2)
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)


@pytest.mark.parametrize("recompute", [None, "layer"])
def test_a_first_layer_that_works_in_place_leaves_the_batch_as_it_was(recompute: Any) -> None:
    """Microbatches share a count of writes, so that torch refused every backward but the last."""
    layers = nn.Sequential(nn.ELU(inplace=True), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(9, 6), torch.randn(9, 6)
    before = x.clone()
    with pykern.Pipeline(
        layers, devices="cpu:2", microbatches=4, loss_fn=F.mse_loss, recompute=recompute
    ) as pipe:
        for _ in range(2):
            expected = plain_step(plain, x.clone(), y, F.mse_loss, 4)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)
            assert torch.equal(x, before)


def test_three_waves() -> None:
    case = CASES["mlp"](7)
    layers = torch.nn.Sequential(*case.layers, *copy.deepcopy(case.layers))
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(
        layers, devices="cpu:3", schedule="hanayo", waves=3, microbatches=4, loss_fn=case.loss_fn
    ) as pipe:
        expected = plain_step(plain, case.inputs, case.target, case.loss_fn, 4)
        assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
        assert_same_state(pipe, plain)


def test_training_stays_equal_over_many_optimizer_steps() -> None:
    case = CASES["gpt"](10)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers, devices="cpu:3", schedule="one_f_one_b", microbatches=4, loss_fn=case.loss_fn
    ) as pipe:
        ours = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            ours.zero_grad()
            theirs.zero_grad()
            expected = plain_step(plain, case.inputs, case.target, case.loss_fn, 4)
            losses.append(pipe.step(case.inputs, target=case.target))
            assert torch.equal(losses[-1], expected)
            ours.step()
            theirs.step()
        assert losses[-1] < losses[0] / 2
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name))


def test_the_step_is_the_mean_over_the_full_batch() -> None:
    """Uneven microbatches count by their rows: 7 rows in 4 parts equal one batch of 7 rows."""
    case = CASES["mlp"](7)
    double = case.layers.double()
    plain = copy.deepcopy(double)
    x, y = case.inputs.double(), case.target.double()
    with pykern.Pipeline(double, devices="cpu:2", microbatches=4, loss_fn=case.loss_fn) as pipe:
        loss = pipe.step(x, target=y)
    whole = case.loss_fn(plain(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-14, atol=0)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-15
        )


def test_sum_reduction_adds_microbatches() -> None:
    case = CASES["mlp"](7)
    plain = copy.deepcopy(case.layers)

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, target, reduction="sum")

    with pykern.Pipeline(
        case.layers, devices="cpu:2", microbatches=3, loss_fn=total, reduction="sum"
    ) as pipe:
        loss = pipe.step(case.inputs, target=case.target)
    for x, y in zip(case.inputs.split([3, 2, 2]), case.target.split([3, 2, 2]), strict=True):
        total(plain(x), y).backward()
    torch.testing.assert_close(loss, total(plain(case.inputs), case.target).detach())
    assert_same_state(pipe, plain)


@pytest.mark.parametrize("model", CASES)
def test_forward_only_equals_the_plain_model(model: str) -> None:
    case = CASES[model](9)
    plain = copy.deepcopy(case.layers).eval()
    with pykern.Pipeline(case.layers, devices="cpu:4", schedule="hanayo", microbatches=4) as pipe:
        pipe.eval()
        for rows in (9, 2, 5):
            with torch.no_grad():
                output = pipe(case.inputs[:rows])
                parts = case.inputs[:rows].tensor_split(4)
                expected = torch.cat([plain(part) for part in parts if len(part)])
            assert torch.equal(output, expected)
            assert not output.requires_grad
            # A loss outside gets the same.
            assert torch.equal(pipe(case.inputs[:rows]), expected)

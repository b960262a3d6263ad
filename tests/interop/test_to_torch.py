"""Plans on torch's runtime, in gloo processes: the plain model's gradients, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.plan import Kind, Placement, Plan
from pykern.schedules import by_name, hanayo, one_f_one_b, zb_h1
from pykern.search import auto
from tests import peers
from tests.interop.torch_peers import (
    ROWS_PER_MICROBATCH,
    Gradients,
    evaluate,
    expected,
    loss_of,
    make_batch,
    make_model,
    several,
    train,
)
from tests.support.plans import parsed

NUM_MICROBATCHES = 4


def plans_for(num_devices: int) -> dict[str, Plan]:
    """Waves, searched ones with and without a cap, zero bubble, and pairs that share a slot."""
    count = NUM_MICROBATCHES
    return {
        "hanayo": hanayo(num_devices, count, waves=1),
        "hanayo, 2 waves": hanayo(num_devices, count, waves=2),
        "searched": auto(num_devices, count, budget_ms=20).plan,
        "searched, capped": auto(num_devices, count, memory=0.75, budget_ms=20).plan,
        "zb_h1": zb_h1(num_devices, count),
        "zb_v": by_name["zb_v"](num_devices, count),
        "dualpipe_v": by_name["dualpipe_v"](num_devices, max(count, 2 * num_devices)),
    }


def merged(parts: list[Any]) -> Gradients:
    return {name: gradient for part in parts for name, gradient in part.items()}


def expect_equal(found: Gradients, wanted: Gradients, what: str = "") -> None:
    assert found.keys() == wanted.keys(), what
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), (what, name)


def own(*rows: str) -> Plan:
    """A user's plan of two stages, in which microbatches run in whatever order is written."""
    actions = parsed(rows)
    return Plan(Placement.linear(2), 3, actions)


OWN = own("0F2 0F0 0F1 0B1 0I0 0I2 0W2 0W0", "1F2 1F0 1F1 1B1 1I0 1I2 1W0 1W2")
FROZEN = {"zb_h1": 1, "zb_v": 2}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    """The findings of each of two processes, by test."""
    jobs: dict[str, tuple[Any, ...]] = {
        "plans": (train, list(plans_for(2).values())),
        "own": (train, [OWN]),
        "own, unscaled": (train, [OWN], False),
        "evaluation": (evaluate, hanayo(2, NUM_MICROBATCHES)),
    }
    for name, num_frozen in FROZEN.items():
        jobs[name] = (train, [by_name[name](2, NUM_MICROBATCHES)], True, num_frozen)
    results = peers.run(2, several, list(jobs.values()))
    return {name: [result[i] for result in results] for i, name in enumerate(jobs)}


def expect_trained(plans: dict[str, Plan], results: list[Any]) -> None:
    for number, (name, plan) in enumerate(plans.items()):
        parts = [result[number] for result in results]
        # Each microbatch's loss is divided by their number: the mean over the batch.
        found = merged([gradients for gradients, _, _ in parts])
        expect_equal(found, expected(plan, scale=plan.num_microbatches), name)
        device = plan.placement.device_of(plan.num_stages - 1)
        expect_losses_and_outputs(plan, parts[device][1], parts[device][2])


def expect_losses_and_outputs(plan: Plan, losses: list[Tensor], output: Tensor | None) -> None:
    """Checks those of the second step; both are in the order of the microbatches."""
    batch, target = make_batch(plan.num_microbatches, seed=9)
    model = nn.Sequential(*make_model(plan.num_stages))
    plain = [model(part) for part in batch.split(ROWS_PER_MICROBATCH)]
    assert output is not None
    assert torch.equal(output, torch.cat(plain))
    of_parts = map(loss_of, plain, target.split(ROWS_PER_MICROBATCH))
    assert torch.equal(torch.stack(losses), torch.stack(list(of_parts)))
    assert not any(loss.requires_grad for loss in losses)


def test_gradients_of_two_processes(two: dict[str, list[Any]]) -> None:
    expect_trained(plans_for(2), two["plans"])


@pytest.mark.slow
def test_gradients_of_four_processes() -> None:
    plans = plans_for(4)
    # Three stages a device are enough, and pairs in a slot have been seen in two processes.
    del plans["searched"], plans["dualpipe_v"]
    expect_trained(plans, peers.run(4, train, list(plans.values())))


def test_microbatches_run_in_any_order_on_the_last_stage_too(two: dict[str, list[Any]]) -> None:
    expect_trained({"own": OWN}, two["own"])
    found = merged([result[0][0] for result in two["own, unscaled"]])
    expect_equal(found, expected(OWN, scale=1))


@pytest.mark.parametrize("name", FROZEN)
def test_split_backwards_behind_frozen_stages(two: dict[str, list[Any]], name: str) -> None:
    plan = by_name[name](2, NUM_MICROBATCHES)
    assert plan.has(Kind.W)
    found = merged([result[0][0] for result in two[name]])
    wanted = expected(plan, scale=NUM_MICROBATCHES)
    frozen = tuple(f"{stage}." for stage in range(FROZEN[name]))
    expect_equal(found, {n: g for n, g in wanted.items() if not n.startswith(frozen)})


def test_evaluation_gives_outputs_and_no_gradients(two: dict[str, list[Any]]) -> None:
    plan = hanayo(2, NUM_MICROBATCHES)
    batch, target = make_batch(NUM_MICROBATCHES)
    model = nn.Sequential(*make_model(plan.num_stages))
    plain = torch.cat([model(part) for part in batch.chunk(NUM_MICROBATCHES)])
    (before, after, losses), _ = two["evaluation"][0]
    assert two["evaluation"][1][0] == [None, None, []]
    assert torch.equal(before, plain)
    assert torch.equal(after, plain)
    parts = zip(plain.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True)
    assert torch.equal(torch.stack(losses), torch.stack([loss_of(*part) for part in parts]))
    wanted = expected(plan, scale=NUM_MICROBATCHES, seeds=[8])
    expect_equal(merged([gradients for _, gradients in two["evaluation"]]), wanted)


def test_one_process_is_a_pipeline_too() -> None:
    plan = one_f_one_b(1, 3)
    expect_trained({"one": plan}, peers.run(1, train, [plan]))

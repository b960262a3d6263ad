"""Replicas side by side: ten steps with the bits of the reference order, and the same losses.

The reference: each replica adds up its own microbatches in ascending order, then the sums are added
in the order of the replicas.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, with_reductions, with_replicas
from tests.diagonal import diagonal
from tests.runtime.models import CASES, Case, mlp
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# Schedules of two devices each.
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "one_f_one_b": {},
    "interleaved": {"num_chunks": 2},
    "zb_h1": {},
    "hanayo": {"waves": 2},
    "zb_v": {},
    "chimera": {},
    "auto": {"budget_ms": 2},
}
# Running statistics are refused where there are replicas.
MODELS = sorted(CASES.keys() - {"cnn"})
# With as many microbatches that all have the same, and so that some have one less.
COUNTS = [(2, 4), (2, 5), (3, 6), (3, 7)]


def pipeline(case: Case, name: str, counts: tuple[int, int], **options: Any) -> pykern.Pipeline:
    replicas, microbatches = counts
    return pykern.Pipeline(
        case.layers,
        devices=f"cpu:{2 * replicas}",
        schedule=name,
        replicas=replicas,
        microbatches=microbatches,
        loss_fn=case.loss_fn,
        **SCHEDULES[name],
        **options,
    )


def require_ten_steps(pipe: pykern.Pipeline, case: Case, plain: nn.Sequential) -> None:
    """Batches of several sizes; the gradients of steps 4 and 5, and of 8 and 9, are accumulated."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (pipe, plain)]
    for step, rows in zip(range(10), itertools.cycle([11, 8, 3, 1, 10, 11])):
        x, y = case.inputs[:rows], case.target[:rows]
        count, num_replicas = pipe.plan.num_microbatches, pipe.plan.placement.num_replicas
        expected = plain_step(
            plain, x, y, case.loss_fn, count, pipe.partition.stages, num_replicas=num_replicas
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)
        if step not in (4, 8):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "model", "counts"), diagonal(SCHEDULES, MODELS, COUNTS))
def test_ten_steps_have_the_bits_of_the_reference_order(
    name: str, model: str, counts: tuple[int, int]
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with pipeline(case, name, counts) as pipe:
        num_replicas = 2 * counts[0] if name == "chimera" else counts[0]
        assert pipe.plan.placement.num_replicas == num_replicas
        assert (pipe.plan.num_devices, pipe.plan.num_microbatches) == (2 * counts[0], counts[1])
        require_ten_steps(pipe, case, plain)


@pytest.mark.parametrize("recompute", ["stage", "layer", ["stage", None]])
@pytest.mark.parametrize("model", ["dropout", "frozen"])
def test_recomputed_microbatches_have_the_same_bits(model: str, recompute: Any) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with pipeline(case, "zb_h1", (2, 5), recompute=recompute) as pipe:
        assert pipe.plan.has(Kind.R)
        require_ten_steps(pipe, case, plain)


@pytest.mark.parametrize("microbatches", [4, 6])
@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_chimera_on_four_devices_has_the_bits_of_the_reference_order(
    model: str, microbatches: int
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers,
        devices="cpu:4",
        schedule="chimera",
        microbatches=microbatches,
        loss_fn=case.loss_fn,
    ) as pipe:
        require_ten_steps(pipe, case, plain)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_of_one_device_are_data_parallel_alone(replicas: int) -> None:
    case = CASES["gpt"](11)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers,
        devices=f"cpu:{replicas}",
        replicas=replicas,
        microbatches=replicas,
        loss_fn=case.loss_fn,
    ) as pipe:
        assert pipe.plan.num_stages == 1
        require_ten_steps(pipe, case, plain)


@pytest.mark.parametrize("replicas", [2, 3])
def test_losses_and_masks_are_those_of_one_replica(replicas: int) -> None:
    """Random numbers depend on seed, stage and microbatch, so not on which replica runs it."""
    case = CASES["dropout"](12)
    alone = copy.deepcopy(case)
    with (
        pipeline(case, "one_f_one_b", (replicas, 6)) as pipe,
        pykern.Pipeline(alone.layers, devices="cpu:2", microbatches=6, loss_fn=case.loss_fn) as one,
    ):
        assert [*pipe.partition.stages] == [*one.partition.stages]
        losses = []
        for each in (pipe, one):
            torch.manual_seed(5)
            losses.append([each.step(case.inputs, target=case.target) for _ in range(3)])
        assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_a_plan_is_for_one_replica() -> None:
    case = mlp(11)
    plain = copy.deepcopy(case.layers)
    plan = schedules.hanayo(2, 3, waves=1)
    with pykern.Pipeline(
        case.layers, devices="cpu:4", schedule=plan, replicas=2, loss_fn=case.loss_fn
    ) as pipe:
        assert pipe.plan.num_microbatches == 6
        rows = [[a for a in row if a.kind is not Kind.REDUCE] for row in pipe.plan.rows]
        assert rows == [list(row) for row in with_replicas(plan, 2).rows]
        require_ten_steps(pipe, case, plain)


def test_a_budget_is_for_each_of_all_devices() -> None:
    case = mlp(12)
    plain = copy.deepcopy(case.layers)
    most = [1e9, 1e9, 1e4, 1e9]
    budget = pykern.Budget(most, sample=case.inputs[:3], target=case.target[:3])
    with pipeline(case, "gpipe", (2, 4), recompute=budget) as pipe:
        assert pipe.fitted is not None
        assert len(pipe.fitted.peak_bytes) == 4
        assert all(peak <= cap for peak, cap in zip(pipe.fitted.peak_bytes, most, strict=True))
        require_ten_steps(pipe, case, plain)


def test_outputs_and_streams_are_those_of_one_replica() -> None:
    case = mlp(11)
    with pipeline(case, "interleaved", (2, 5)) as pipe, torch.no_grad():
        pipe.eval()
        batches = [case.inputs[:rows] for rows in (11, 1, 6, 2)]
        expected = [
            torch.cat([case.layers(part) for part in x.tensor_split(5) if len(part)])
            for x in batches
        ]
        for x, output in zip(batches, expected, strict=True):
            assert torch.equal(pipe(x), output)
        for streamed, output in zip(pipe.stream(batches), expected, strict=True):
            assert torch.equal(streamed, output)


class Failing(nn.Module):
    """Raises for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.error = KeyError("this one")

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == 7:
            raise self.error
        return x


def test_a_fault_names_the_replicas_device_and_the_next_step_is_right() -> None:
    failing = Failing()
    layers = nn.Sequential(failing, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    case = Case(layers, torch.randn(6, 4), torch.randn(6, 4), F.mse_loss)
    plain = copy.deepcopy(layers)
    with pipeline(case, "one_f_one_b", (2, 6)) as pipe:
        spoilt = case.inputs.clone()
        spoilt[3, 0] = 7
        with pytest.raises(KeyError) as caught:
            pipe.step(spoilt, target=case.target)
        assert caught.value is failing.error
        notes = " ".join(caught.value.__notes__)
        assert f"stage 0, microbatch 3, action {Action(Kind.F, 0, 3)}, device 2" in notes
        pipe.zero_grad()
        require_ten_steps(pipe, case, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 3}, "devices must be a multiple of replicas, 3, got 4"),
        ({"replicas": 0}, "replicas must be 1 to 16777216, got 0"),
        ({"replicas": 4, "microbatches": 3}, "microbatches must be at least replicas, 4, got 3"),
        (
            {"schedule": schedules.gpipe(4, 3)},
            "devices must be 4 for each of 2 replicas, as in the plan, got 2",
        ),
        (
            {"schedule": schedules.gpipe(2, 3), "microbatches": 8},
            "microbatches must be 3 for each of 2 replicas, as in the plan, got 4",
        ),
        (
            {"schedule": with_reductions(schedules.chimera(2, 3))},
            "plan must have neither REDUCE nor U to be replicated",
        ),
        ({"schedule": "chimera", "replicas": 4}, "num_devices must be even for chimera, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"devices": "cpu:4", "replicas": 2, "microbatches": 6}
    with pytest.raises(ValueError, match=message):
        pykern.Pipeline(mlp(4).layers, **{**given, **options})

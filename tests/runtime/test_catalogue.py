"""Every schedule of the catalogue trains to the plain model's bits, or is clearly refused."""

import copy

import pytest
import torch

import pykern
from pykern import schedules
from tests.runtime.models import CASES
from tests.runtime.reference import assert_same_state, plain_step

# What they are for, or need, that CPU workers do not run in a step.
REFUSED = {
    "pipedream": (ValueError, "the plan holds U actions"),
    "pipedream_2bw": (ValueError, "the plan holds U actions"),
    "seq1f1b": (ValueError, "the plan cuts microbatches into 2 slices"),
    "forward_only": (RuntimeError, "the plan has forward actions only"),
}
COUNTS = [(2, 4), (2, 9), (4, 8)]


def step_equals_the_plain_models(
    name: str, num_devices: int, num_microbatches: int, model: str
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    plan = schedules.by_name[name](num_devices, num_microbatches)
    with pykern.Pipeline(
        case.layers,
        devices=f"cpu:{num_devices}",
        schedule=plan,
        loss_fn=case.loss_fn,
        balance="layers",
    ) as pipe:
        expected = plain_step(
            plain,
            case.inputs,
            case.target,
            case.loss_fn,
            num_microbatches,
            pipe.partition.stages,
            num_replicas=plan.placement.num_replicas,
        )
        assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
        assert_same_state(pipe, plain)


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(("num_devices", "num_microbatches"), COUNTS)
@pytest.mark.parametrize("name", sorted(set(schedules.by_name) - set(REFUSED)))
def test_every_schedule_trains_to_the_same_bits(
    name: str, num_devices: int, num_microbatches: int, model: str
) -> None:
    if name == "chimera" and model == "cnn":
        with pytest.raises(ValueError, match="running statistics"):
            step_equals_the_plain_models(name, num_devices, num_microbatches, model)
        return
    step_equals_the_plain_models(name, num_devices, num_microbatches, model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cpu_workers_do_not_run_is_refused(name: str) -> None:
    error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        step_equals_the_plain_models(name, 2, 4, "mlp")

"""Values that skip stages: the bits of the plain model, and nothing in the stages between."""

from typing import Any

import pytest
import torch

from pykern import schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.plans import recomputed, split_some, two_replicas
from tests.runtime.reference import assert_same_state
from tests.runtime.skip_models import MODELS, Skips, pipeline, plain_output, plain_step, twin_of

PLANS: dict[str, Plan] = {
    "gpipe": schedules.gpipe(4, 4),
    "one_f_one_b": schedules.one_f_one_b(3, 5),
    "one_f_one_b of two": schedules.one_f_one_b(2, 4),
    "interleaved": schedules.interleaved(2, 4, 2),
    "hanayo": schedules.hanayo(2, 4, waves=1),
    "zb_h1": schedules.zb_h1(4, 6),
    "zb_v": schedules.zb_v(2, 5),
    "some split": split_some(schedules.one_f_one_b(4, 6)),
    "chimera": schedules.chimera(4, 4),
    "two replicas": two_replicas(3, 4),
}


def check(case: Skips, plan: Plan, devices: Any, num_steps: int = 2, **options: Any) -> None:
    """Steps of the pipeline and of the plain model, equal to the bit, and their outputs."""
    plain = twin_of(case)
    count, replicas = plan.num_microbatches, plan.placement.num_replicas
    with pipeline(case, plan, devices, **options) as pipe:
        for _ in range(num_steps):
            expected = plain_step(plain, case, count, replicas)
            assert torch.equal(pipe.step(**case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)
        output = pipe(**case.inputs)
        assert torch.equal(output, plain_output(plain, case, count))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_workers(name: str, model: str) -> None:
    plan = PLANS[name]
    check(MODELS[model](plan.num_microbatches + 1), plan, f"cpu:{plan.num_devices}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_gpus(gpus: FakeCuda, name: str, model: str) -> None:
    plan = PLANS[name]
    case = MODELS[model](plan.num_microbatches)
    check(case, plan, [f"cuda:{device}" for device in range(plan.num_devices)])


@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("name", ["zb_h1", "interleaved"])
def test_recomputed(gpus: FakeCuda, name: str, level: Any) -> None:
    plan = recomputed(PLANS[name])
    case = MODELS["dense"](plan.num_microbatches)
    check(case, plan, [f"cuda:{device}" for device in range(plan.num_devices)], recompute=level)

"""Failures on the fake driver: a clear error, everything drained, nothing left, the next step
right."""

import copy
import gc
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern import _C, schedules
from pykern.plan import Kind, Plan
from tests.diagonal import diagonal
from tests.fake_cuda.fake import API, FakeCuda
from tests.runtime.conftest import expect_nothing_broken
from tests.runtime.models import Case, mlp
from tests.runtime.plans import recomputed, split_backward, two_replicas
from tests.runtime.test_faults import NUM_MICROBATCHES, Fuse, fail_once
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

FUNCTIONS = re.findall(r"^    X\((cu\w+),", API.read_text(), re.MULTILINE)
OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719


def calls_of(gpus: FakeCuda, run: Callable[[], object]) -> dict[str, int]:
    """How often `run` calls each of the driver's functions."""
    before = {name: gpus.calls(name) for name in FUNCTIONS}
    run()
    after = {name: gpus.calls(name) - before[name] for name in FUNCTIONS}
    return {name: count for name, count in after.items() if count}


def some_of(count: int) -> list[int]:
    return sorted({1, (count + 1) // 2, count})


def make(case: Case, num_parts: int = 1) -> pykern.Pipeline:
    """Two GPUs of which one reaches the other's memory, or two parts of one."""
    return pykern.Pipeline(
        case.layers,
        devices=["cuda:0", "cuda:1"] if num_parts == 1 else "cuda:0/2",
        schedule=schedules.one_f_one_b(2, 3),
        loss_fn=case.loss_fn,
    )


def test_every_call_of_a_step_may_fail_once(gpus: FakeCuda) -> None:
    gpus.set_peer(0, 1, reachable=False)
    case = mlp(7)
    x, y = case.inputs, case.target
    plain = copy.deepcopy(case.layers)
    expected = plain_step(plain, x, y, case.loss_fn, 3)
    with pytest.warns(UserWarning, match="do not reach each other's memory"):
        pipe = make(case)
    with pipe:
        counts = calls_of(gpus, lambda: pipe.step(x, target=y))
        # The last one puts the caller's context back, when all has been issued: nobody is told.
        counts["cuCtxSetCurrent"] -= 1
        assert {"cuStreamWaitEvent", "cuEventRecord", "cuMemcpyAsync"} <= counts.keys()
        for name, count in counts.items():
            for nth in some_of(count):
                pipe.zero_grad()
                gpus.fail(name, nth, OUT_OF_MEMORY)
                with pytest.raises(_C.CudaError, match=f"{name}: CUDA_ERROR_OUT_OF_MEMORY"):
                    pipe.step(x, target=y)
                pipe.zero_grad()
                assert torch.equal(pipe.step(x, target=y), expected)
                assert_same_state(pipe, plain)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_every_call_while_a_pipeline_is_made_may_fail_once(gpus: FakeCuda, num_parts: int) -> None:
    case = mlp(7)
    # The first to need the driver starts it. Objects that a pipeline holds go when it is collected.
    make(case, num_parts).close()
    gc.collect()
    _C.destroy_idle_streams()
    made: list[pykern.Pipeline] = []
    counts = calls_of(gpus, lambda: made.append(make(case, num_parts)))
    made.pop().close()
    # Every other one puts back what was current before, and fails unheard; so does HostGpus's wait
    # for devices, which stands for torch's.
    for name in ("cuCtxSetCurrent", "cuCtxSynchronize"):
        counts.pop(name, None)
    for name, count in counts.items():
        for nth in {1, count}:
            expect_nothing_broken(gpus)
            gpus.reset(8)
            gpus.fail(name, nth, OUT_OF_MEMORY)
            # Ours, or what stands for torch's.
            with pytest.raises(RuntimeError, match=f"{name}(: CUDA_ERROR_OUT_OF_MEM| failed with)"):
                make(case, num_parts)


def test_a_context_that_is_lost_is_told_and_a_close_still_works(gpus: FakeCuda) -> None:
    case = mlp(7)
    pipe = make(case)
    gpus.fail("cuEventRecord", 9, LAUNCH_FAILED, sticky=True)
    for _ in range(2):
        with pytest.raises(_C.CudaError, match="context is lost: only a new process can"):
            pipe.step(case.inputs, target=case.target)
    pipe.close()
    assert not any("work after" in text for text in gpus.violations)
    # Objects that cannot be given back any more are not a leak.
    del pipe
    gc.collect()
    gpus.reset(8)


PLANS: dict[str, Plan] = {
    "one_f_one_b": schedules.one_f_one_b(2, NUM_MICROBATCHES),
    "recomputed": recomputed(schedules.one_f_one_b(2, NUM_MICROBATCHES)),
    "split replicas": split_backward(two_replicas(2, NUM_MICROBATCHES)),
}


@pytest.mark.parametrize(
    ("name", "error_type"), diagonal(PLANS, [ArithmeticError, KeyboardInterrupt])
)
def test_every_action_may_raise(gpus: FakeCuda, name: str, error_type: type[BaseException]) -> None:
    plan = PLANS[name]
    layers = nn.Sequential(*(Fuse() for _ in range(plan.num_stages)))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(2, 12, 6)
    num_replicas = plan.placement.num_replicas
    expected = plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES, num_replicas=num_replicas)
    with pykern.Pipeline(
        layers, devices=["cuda:0", "cuda:1"], schedule=plan, loss_fn=F.mse_loss
    ) as pipe:
        for action in (action for row in pipe.plan.rows for action in row):
            # The first stage has no inputs to give gradients to: its I has nothing to do.
            if action.kind is Kind.I and action.stage == 0:
                continue
            # The others fail as they do without recompute.
            if name == "recomputed" and action.kind is not Kind.R:
                continue
            fail_once(pipe, layers, action, error_type(f"planted in {action}"), (x, y))
            pipe.zero_grad()
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)

"""Pairs of GPUs that a plan copies between: enabled, checked, and avoided where bytes change."""

import copy
from typing import Any

import pytest
import torch

from pykern import schedules
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step


@pytest.mark.parametrize("capture", [False, True, "step"])
def test_pairs_that_change_what_they_copy_are_told_and_avoided(
    gpus: FakeCuda, capture: Any
) -> None:
    gpus.set_corrupt(0, 1, True)
    gpus.set_corrupt(2, 1, True)
    case = CASES["mlp"](16)
    plain = copy.deepcopy(case.layers)
    changed = "arrive changed: 0 to 1, 2 to 1. Copies go through pinned memory of the host"
    with pytest.warns(UserWarning, match=changed) as given:
        pipe = case.pipeline(schedules.one_f_one_b(3, 4), "cuda", capture=capture)
    assert len(given) == 1
    with pipe:
        for _ in range(3):
            x, y, stages = case.inputs, case.target, pipe.partition.stages
            expected = plain_step(plain, x, y, case.loss_fn, 4, stages)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def test_a_pair_out_of_reach_is_told_beside_one_that_changes_bytes(gpus: FakeCuda) -> None:
    gpus.set_corrupt(0, 1, True)
    gpus.set_peer(1, 2, reachable=False)
    with pytest.warns(UserWarning, match="memory") as given:
        CASES["mlp"](8).pipeline(schedules.one_f_one_b(3, 4), "cuda").close()
    first, second = (str(warning.message) for warning in given)
    assert "arrive changed: 0 to 1. " in first
    assert "do not reach each other's memory: 1 to 2. " in second


def test_only_pairs_of_the_plan_are_enabled(gpus: FakeCuda) -> None:
    case = CASES["mlp"](8)
    with case.pipeline(schedules.one_f_one_b(3, 4), "cuda") as pipe:
        assert gpus.calls("cuCtxEnablePeerAccess") == 4
        pipe.step(case.inputs, target=case.target)
        assert gpus.staged_copies == 0


def test_both_ways_are_under_way_at_once(gpus: FakeCuda) -> None:
    """The host waits for neither copy before both are issued: here, the first never ends."""
    gpus.hang("cuMemcpyAsync", 1)
    with pytest.raises(RuntimeError, match="cuStreamSynchronize"):
        CASES["mlp"](8).pipeline(schedules.one_f_one_b(2, 4), "cuda")
    assert gpus.calls("cuMemcpyAsync") == 2
    gpus.let_go()
    assert all("the host waits for work that hangs" in text for text in gpus.forgive())

"""The public names, and what each may be called with, are torch's."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.pipelining as theirs
from torch.distributed.pipelining import schedules as their_schedules

import pykern.interop.pipelining as ours
from tests.interop.cases import MULTI, SINGLE

CLASSES = [f"Schedule{name}" for name in (*SINGLE, *MULTI)]


# Arguments that torch's schedules got in 2.14 and in 2.15, and that ours have under every torch.
LATER = [
    {"arg_mbs", "kwarg_mbs", "target_mbs"},
    {
        "finalize_gradients",
        "max_active_stages",
        "unshard_lookahead",
        "defer_reduce_grad_wait",
        "max_outstanding_sends",
    },
]
# torch's names that are not here: none of their analysis of storage, nor contexts around forwards.
MISSING = {
    "analyze_pipeline_activation_liveness",
    "PipelineActivationLiveness",
    "PipelineStageInfo",
}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def expect_alike(ours_: Callable[..., Any], theirs_: Callable[..., Any]) -> None:
    """Ours takes what torch's takes, and what torch's takes in a later release."""
    mine, expected = parameters(ours_), parameters(theirs_)
    extra = {name for name, _, _ in mine} - {name for name, _, _ in expected}
    assert [each for each in mine if each[0] not in extra] == expected
    # A release brings all of its arguments or none.
    names = {name for name, _, _ in mine}
    assert extra == {name for later in LATER if later & extra for name in later & names}


@pytest.mark.parametrize("name", ["PipelineStage", "pipeline", "build_stage", *CLASSES])
def test_constructors(name: str) -> None:
    expect_alike(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("name", ["PipelineScheduleSingle", "PipelineScheduleMulti"])
def test_bases(name: str) -> None:
    base, their_base = getattr(ours, name), getattr(their_schedules, name)
    expect_alike(base, their_base)
    for method in ("step", "eval"):
        expect_alike(getattr(base, method), getattr(their_base, method))
    derived = {name for name in CLASSES if issubclass(getattr(ours, name), base)}
    assert derived == {name for name in CLASSES if issubclass(getattr(theirs, name), their_base)}


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", *SINGLE, *MULTI])
def test_classes_by_name(name: str) -> None:
    found, expected = ours.get_schedule_class(name), their_schedules.get_schedule_class(name)
    assert found.__name__ == expected.__name__


def test_methods_of_a_pipe() -> None:
    for method in ("get_stage_module", "build_stage", "info", "forward"):
        assert parameters(getattr(ours.Pipe, method)) == parameters(getattr(theirs.Pipe, method))


def test_all_public_names_are_there() -> None:
    assert set(theirs.__all__) - set(ours.__all__) in (set(), MISSING)

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


# The arguments of torch's schedules since 2.14, and of ours under every torch.
LATER = {"arg_mbs", "kwarg_mbs", "target_mbs"}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize("name", ["PipelineStage", "pipeline", "build_stage", *CLASSES])
def test_constructors(name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


@pytest.mark.parametrize("name", ["PipelineScheduleSingle", "PipelineScheduleMulti"])
def test_bases(name: str) -> None:
    base, their_base = getattr(ours, name), getattr(their_schedules, name)
    assert parameters(base) == parameters(their_base)
    for method in ("step", "eval"):
        expected = parameters(getattr(their_base, method))
        missing = LATER - {name for name, _, _ in expected}
        ours_now = [each for each in parameters(getattr(base, method)) if each[0] not in missing]
        assert ours_now == expected
        assert missing in (set(), LATER)
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
    assert set(theirs.__all__) <= set(ours.__all__)

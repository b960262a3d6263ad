"""Promises of every schedule: any counts run, microbatches ascend, bad input is refused."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykern import schedules
from pykern.plan import Kind, Plan, check

Schedule = Callable[[int, int], Plan]

CATALOGUE = Path(__file__).parents[2] / "schedules"


def test_any_counts_give_a_plan_that_runs(schedule: Schedule) -> None:
    for num_devices in range(1, 9):
        for num_microbatches in range(1, 33):
            plan = schedule(num_devices, num_microbatches)
            check(plan)
            check(plan.forward_only())
            assert (plan.num_devices, plan.num_microbatches) == (num_devices, num_microbatches)


# Counts of devices and microbatches that a schedule refuses, and what it says then.
REFUSES: dict[str, tuple[Callable[[int, int], bool], str]] = {
    "chimera": (lambda num_devices, _: num_devices % 2 == 1, "num_devices must be even"),
    "dualpipe_v": (
        lambda num_devices, num_microbatches: num_microbatches < 2 * num_devices,
        "num_microbatches must be at least 2 [*] num_devices",
    ),
}


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", schedules.by_name)
def test_usual_counts_give_a_plan_that_runs_or_a_clear_refusal(name: str, num_devices: int) -> None:
    usual = {1, 2, *(num_devices * groups for groups in (1, 2, 4)), 4 * num_devices + 1}
    refuses, message = REFUSES.get(name, (lambda *_: False, ""))
    for num_microbatches in usual:
        if refuses(num_devices, num_microbatches):
            with pytest.raises(ValueError, match=message):
                schedules.by_name[name](num_devices, num_microbatches)
        else:
            check(schedules.by_name[name](num_devices, num_microbatches))


FORWARD, INPUT, WEIGHT = {Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("kinds", [FORWARD, INPUT, WEIGHT])
def test_microbatches_ascend_in_every_stage(
    schedule: Schedule, num_microbatches: int, kinds: set[Kind]
) -> None:
    plan = schedule(4, num_microbatches)
    for row in plan.rows:
        for stage in {action.stage for action in row}:
            order = [a.microbatch for a in row if a.stage == stage and a.kind in kinds]
            assert order == list(range(num_microbatches))


def counts_of(schedule: Callable[..., Plan]) -> list[str]:
    parameters = inspect.signature(schedule).parameters.values()
    return [p.name for p in parameters if p.annotation in (int, int | None)]


def flags_of(schedule: Callable[..., Plan]) -> list[str]:
    parameters = inspect.signature(schedule).parameters.values()
    return [p.name for p in parameters if p.annotation is bool]


@pytest.mark.parametrize("name", schedules.by_name)
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0, ValueError, "{} must be 1 to 16777216, got 0"),
        (-3, ValueError, "{} must be 1 to 16777216, got -3"),
        (2**70, ValueError, "{} must be 1 to 16777216, got 1180591620717411303424"),
        (True, TypeError, "{} must be an int, got True"),
        (2.0, TypeError, "{} must be an int, got 2.0"),
        ("2", TypeError, "{} must be an int, got '2'"),
        (None, TypeError, "{} must be an int, got None"),
    ],
)
def test_bad_counts_are_refused(name: str, bad: Any, error: type, message: str) -> None:
    schedule = schedules.by_name[name]
    for parameter in counts_of(schedule):
        if bad is None and inspect.signature(schedule).parameters[parameter].default is None:
            continue  # not given
        counts = dict.fromkeys(counts_of(schedule), 2) | {parameter: bad}
        with pytest.raises(error, match=re.escape(message.format(parameter))):
            schedule(**counts)


def test_flags_other_than_a_bool_are_refused() -> None:
    flags = [
        (schedule, flag) for schedule in schedules.by_name.values() for flag in flags_of(schedule)
    ]
    assert {flag for _, flag in flags} == {"optimised", "doubling", "early"}
    for schedule, flag in flags:
        for bad in (1, None, "no"):
            with pytest.raises(TypeError, match=f"{flag} must be True or False, got {bad!r}"):
                schedule(2, 4, **{flag: bad})


@pytest.mark.parametrize("schedule", [schedules.interleaved, schedules.pipedream_2bw])
def test_groups_smaller_than_the_pipeline_are_refused(schedule: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="group must be at least num_devices, 4, got 3"):
        schedule(4, 8, group=3)


@pytest.mark.parametrize("group", [1, 5])
def test_groups_that_would_deadlock_or_only_hold_more_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group must be 2 to 4 for num_devices=4, got {group}"):
        schedules.gis(4, 8, group=group)


@pytest.mark.parametrize("name", schedules.by_name)
def test_unknown_options_and_plans_too_large_are_refused(name: str) -> None:
    schedule = schedules.by_name[name]
    with pytest.raises(TypeError, match="unexpected keyword argument 'wavez'"):
        schedule(2, 2, wavez=2)
    with pytest.raises(ValueError, match="must be 1 to"):
        schedule(2**10, 2**20)


def test_the_catalogue_names_every_file() -> None:
    files = {path.stem for path in CATALOGUE.glob("*.py")} - {"__init__"}
    table = (CATALOGUE / "README.md").read_text()
    listed = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.py\) \|", table, re.MULTILINE)
    assert files == set(schedules.by_name)
    assert sorted(listed) == sorted((name, name) for name in files)
    assert all(function.__name__ == name for name, function in schedules.by_name.items())

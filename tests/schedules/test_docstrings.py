"""Each schedule's docstring says what it does: its table and its closed forms are compared."""

import inspect
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product

import pytest

from pykern import schedules
from pykern.plan import Costs, Kind, Plan, simulate, weight_versions

NAMES = list(schedules.by_name)


def docstring(name: str) -> str:
    return inspect.getdoc(schedules.by_name[name]) or ""


def drawn(plan: Plan) -> list[str]:
    """The timetable where every action takes one slot, a pair two; an idle slot is a dot."""
    timeline = simulate(plan, Costs(1, 1, input_ns=1, weight_ns=1))
    width = max(len(str(action)) for row in plan.rows for action in row)
    lines = []
    for device, row in enumerate(timeline.rows):
        slots = ["."] * round(timeline.makespan_ns)
        for span in row:
            slot = round(span.start_ns)
            slots[slot if slots[slot] == "." else slot + 1] = str(span.action)
        lines.append(f"device {device} | " + " ".join(slot.ljust(width) for slot in slots).rstrip())
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_the_table_is_the_plans(name: str) -> None:
    slots = r"where (?:F and B take|every action takes) one[ \n]slot(?:[ \n]each)?"
    call = re.search(
        rf"^{name}\((.*)\), (in order, without times|{slots}):$", docstring(name), re.M
    )
    assert call is not None
    counts = dict(item.split("=") for item in call[1].split(", "))
    plan = schedules.by_name[name](**{key: int(value) for key, value in counts.items()})
    table = re.findall(r"^ +(device .*)$", docstring(name), re.M)
    assert table == (str(plan).split("\n") if "without times" in call[2] else drawn(plan))


Letters = dict[str, int | Fraction]


def closed_form(name: str, measure: str, **letters: int | Fraction) -> Fraction:
    form = re.search(rf"^ +{measure} += (.*)$", docstring(name), re.M)
    assert form is not None
    return Fraction(eval(form[1], {"min": min, "max": max}, letters))


# Option, its letter in the formulas, and the values to try.
OPTIONS: dict[str, tuple[str, str, list[int]] | None] = {
    "gpipe": None,
    "one_f_one_b": None,
    "interleaved": ("num_chunks", "v", [1, 2, 4]),
    "hanayo": ("waves", "W", [1, 2, 4]),
    "one_f_one_b_eager": None,
    "breadth_first": ("num_chunks", "v", [1, 2, 4]),
    "chimera": None,
    "forward_only": ("num_chunks", "v", [1, 2, 4]),
    "pipedream": None,
    "pipedream_2bw": None,
    "seq1f1b": ("num_slices", "k", [1, 2, 3]),
    "zb_h1": None,
    "zb_h2": None,
    "interleaved_zb": ("num_chunks", "v", [1, 2, 4]),
    "zb_v": None,
    "v_half": None,
    "v_min": None,
    "gis": ("num_chunks", "v", [1, 2, 4]),
    "dualpipe_v": None,
}

Times = list[tuple[float, float, float]]
ANY: Times = list(product((1, 2, 3), (1, 2, 3), (1, 2, 3)))
INPUT_NOT_SHORTEST: Times = [times for times in ANY if times[1] >= min(times[0], times[2])]
FORWARD_NOT_SHORTEST: Times = [times for times in ANY if times[0] >= min(times[1], times[2])]
EQUAL: Times = [(1, 1, 1), (2, 2, 2)]
FAST_WEIGHT: Times = [(1, 1, 1), (2, 2, 1), (4, 4, 3), (4, 4, 1)]
SLOW_INPUT: Times = [(1, 1, 1), (2, 2, 1), (2, 3, 1), (1, 2, 2), (2, 5, 4), (4, 4, 1)]

# Schedules with split backward: the F, I and W at which the forms hold, and the least M for P.
SPLIT: dict[str, tuple[Times, Callable[[int], int]]] = {
    "zb_h1": (INPUT_NOT_SHORTEST, lambda num_devices: num_devices),
    "zb_h2": (FORWARD_NOT_SHORTEST, lambda num_devices: 2 * num_devices - 1),
    "interleaved_zb": (INPUT_NOT_SHORTEST, lambda num_devices: num_devices),
    "zb_v": (SLOW_INPUT, lambda num_devices: 2 * num_devices - 1),
    "v_half": (EQUAL, lambda num_devices: 2 * num_devices),
    "v_min": (EQUAL, lambda num_devices: num_devices),
    "gis": (ANY, lambda num_devices: num_devices),
    "dualpipe_v": (FAST_WEIGHT, lambda num_devices: 2 * num_devices),
}


def variants(name: str) -> list[tuple[Callable[[int, int], Plan], dict[str, int]]]:
    option = OPTIONS[name]
    schedule = schedules.by_name[name]
    if option is None:
        return [(schedule, {})]
    keyword, letter, values = option
    return [(partial(schedule, **{keyword: value}), {letter: value}) for value in values]


# Where a schedule runs with fewer numbers of devices than any.
DEVICES = {"chimera": [2, 4, 8]}


@pytest.mark.parametrize(
    ("name", "num_devices"), [(n, p) for n in NAMES for p in DEVICES.get(n, [1, 2, 3, 4, 8])]
)
@pytest.mark.parametrize("multiple", [1, 2, 3, 5])
def test_the_closed_forms_are_the_simulators(name: str, num_devices: int, multiple: int) -> None:
    assert_closed_forms(name, num_devices, multiple * num_devices)


@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "one_f_one_b_eager", "pipedream", "seq1f1b"]
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 7])
def test_the_closed_forms_without_constraint_hold_for_any_count(
    name: str, num_microbatches: int
) -> None:
    for num_devices in (1, 2, 3, 4, 8):
        assert_closed_forms(name, num_devices, num_microbatches)


# T_B is T_I + T_W. The first are those of the bubble ratio.
WHOLE: Times = [(1, 0.5, 0.5), (1, 1, 1), (2, 1.5, 1.5)]


def makespan(plan: Plan, forward: float, input_gradient: float, weight: float) -> float:
    costs = Costs(forward, input_gradient + weight, input_ns=input_gradient, weight_ns=weight)
    return simulate(plan, costs).makespan_ns


def assert_closed_forms(name: str, num_devices: int, num_microbatches: int) -> None:
    if name in SPLIT and num_microbatches < SPLIT[name][1](num_devices):
        return
    for schedule, option in variants(name):
        plan = schedule(num_devices, num_microbatches)
        num_parts = plan.num_stages // num_devices * plan.num_slices
        letters: Letters = {
            "P": num_devices,
            "M": Fraction(num_microbatches),
            **option,
        }
        times, _ = SPLIT.get(name, (WHOLE, None))
        for forward, input_gradient, weight in times:
            shares = {
                "T_F": Fraction(forward) * num_parts,
                "T_B": Fraction(input_gradient + weight) * num_parts,
                "T_I": Fraction(input_gradient) * num_parts,
                "T_W": Fraction(weight) * num_parts,
            }
            expected = closed_form(name, "makespan", **letters, **shares)
            assert makespan(plan, forward, input_gradient, weight) == expected
        timeline = simulate(plan, Costs(1, sum(times[0][1:])))
        expected = closed_form(name, "bubble ratio", **letters)
        assert timeline.bubble_ratio == pytest.approx(float(expected), rel=1e-12, abs=1e-15)
        if plan.forward_only() != plan:
            assert_held(name, plan, letters)


def assert_held(name: str, plan: Plan, letters: Letters) -> None:
    timeline = simulate(plan, Costs(1, 1))
    for device in range(plan.num_devices):
        peak = closed_form(name, "peak in flight", **letters, d=device)
        assert timeline.peak_in_flight(device) == peak
    if plan.has(Kind.U):
        held = [
            closed_form(name, "weight versions", **letters, d=d) for d in range(plan.num_devices)
        ]
        assert weight_versions(plan) == held


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("multiple", [2, 3, 4, 7])
@pytest.mark.parametrize("waves", [1, 2, 3, 4])
def test_the_optimised_wave_has_forms_of_its_own(
    num_devices: int, multiple: int, waves: int
) -> None:
    num_microbatches = multiple * num_devices
    plan = schedules.hanayo(num_devices, num_microbatches, waves, optimised=True)
    letters: Letters = {"P": num_devices, "M": num_microbatches, "W": Fraction(waves)}
    for forward, backward in [(2, 2), (2, 4), (2, 5), (2, 6)]:
        timeline = simulate(plan, Costs(forward, backward))
        shares = {"T_F": 2 * waves * forward, "T_B": 2 * waves * backward}
        expected = closed_form("hanayo", "makespan, optimised", **letters, **shares)
        assert timeline.makespan_ns == expected
        for device in range(num_devices):
            peak = closed_form("hanayo", "peak in flight, optimised", **letters)
            assert timeline.peak_in_flight(device) == peak


@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
@pytest.mark.parametrize("multiple", [2, 4, 6])
def test_chimeras_doubling_has_forms_of_its_own(num_devices: int, multiple: int) -> None:
    num_microbatches = multiple * num_devices
    plan = schedules.chimera(num_devices, num_microbatches, doubling=True)
    letters: Letters = {"P": num_devices, "M": Fraction(num_microbatches)}
    for forward, backward in [(2, 2), (2, 3), (2, 4)]:
        timeline = simulate(plan, Costs(forward, backward))
        times = {"T_F": forward, "T_B": backward}
        assert timeline.makespan_ns == closed_form(
            "chimera", "makespan, doubling", **letters, **times
        )
        for device in range(num_devices):
            single = closed_form("chimera", "peak in flight", **letters, d=device)
            assert timeline.peak_in_flight(device) == 2 * single


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_stand_in_order(name: str) -> None:
    parts = ["device 0 |", "Closed forms", "Constraints:", "Paper:", "Where we differ:", "Args:"]
    places = [docstring(name).find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)
    assert re.search(r"Paper: [^:]+:.*?\d{4}, arXiv \d{4}\.\d{4,5}", docstring(name), re.S)

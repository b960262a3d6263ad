"""The report names a planted cause first, and its parts add up to the step."""

import math
from dataclasses import replace
from random import Random

import pytest

from pykern.boxes import load
from pykern.plan import Action, Costs, Kind, Span, Timeline, simulate, with_recompute
from pykern.plan.costs import changed, costs_with_frozen
from pykern.profiling import Observed, Report, report_of
from pykern.profiling.causes import causes_of, device_speeds
from pykern.profiling.hidden import hidden_share
from pykern.profiling.mean_costs import mean_costs
from pykern.profiling.stage_costs import median_costs, of_stages
from pykern.schedules import one_f_one_b, zb_h1
from tests.profiling.planted import DEVICES, MS, PLANTED, costs_of, make_plan, step

# The layers of four stages that take a millisecond for F, outside of a pipeline.
ALONE = [3 * MS / 4] * 16


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first_20_times_of_20(name: str) -> None:
    random = Random(name)
    assert [causes_of(PLANTED[name](random)).found[0].name for _ in range(20)] == [name] * 20


@pytest.mark.parametrize("name", PLANTED)
def test_work_and_causes_add_up_to_the_makespan(name: str) -> None:
    seen = PLANTED[name](Random(1))
    causes = causes_of(seen)
    total = causes.work_ns + sum(cause.worth_ns for cause in causes.found)
    assert total == pytest.approx(seen.timeline.makespan_ns)


def test_a_balanced_step_as_simulated_has_one_cause() -> None:
    # 1F1B: (M + P - 1) slots of F and B, of which M are work.
    causes = causes_of(step([MS] * DEVICES, microbatches=8))
    assert causes.work_ns == pytest.approx(8 * 3 * MS)
    worth = {cause.name: cause.worth_ns for cause in causes.found}
    assert worth.pop("warm-up and cool-down") == pytest.approx(3 * 3 * MS)
    assert list(worth.values()) == pytest.approx([0.0] * len(worth), abs=1)


def test_remedies_name_the_stage_and_the_device() -> None:
    first = causes_of(step([MS, MS, 4 * MS, MS])).found[0]
    assert first.remedy.startswith("stage 2 takes 12 ms for a microbatch, a stage 5.25 ms on")
    slow = causes_of(step([MS, 4 * MS, MS, MS], layer_ns=ALONE)).found[0]
    assert "device 1 takes 4.0 times as long" in slow.remedy
    assert "pykern.Device('cpu', speed=0.25)" in slow.remedy
    shared = causes_of(PLANTED["shared cores"](Random(1)))
    told = [cause.remedy for cause in shared.found if "4 workers share 2 cores" in cause.remedy]
    assert len(told) == 2  # shared cores, and late starts
    on_one = causes_of(step([MS] * DEVICES, num_cores=1, core_share=0.5)).found[0]
    assert on_one.remedy == "4 workers share 1 core, so use devices='cpu:1'"


def test_a_frozen_stage_beside_split_backwards_is_no_other_work() -> None:
    """Stages with I and W counted their backwards twice: frozen ones seemed to be on fast devices.

    Their work was taken to be that of the others in part, and devices 0 and 3 to be slow.
    """
    plan = zb_h1(DEVICES, 16).with_frozen([1, 2])
    alone = costs_with_frozen(Costs(MS, 2 * MS, input_ns=MS, weight_ns=MS), DEVICES, [1, 2])
    timeline = simulate(plan, alone)
    costs = mean_costs(timeline, Timeline([]), DEVICES)
    assert of_stages(costs, plan) == pytest.approx([3 * MS, 2 * MS, 2 * MS, 3 * MS])
    # The layers alone are measured with their whole backwards.
    layer_ns = [ns / 4 for ns in (3 * MS, 2 * MS, 2 * MS, 3 * MS) for _ in range(4)]
    seen = replace(
        step([MS] * DEVICES, layer_ns=layer_ns), plan=plan, costs=costs, timeline=timeline
    )
    assert device_speeds(seen) == [1.0] * DEVICES
    causes = causes_of(seen)
    assert causes.work_ns == pytest.approx(16 * (3 + 2 + 2 + 3) * MS / 4)
    worth = {cause.name: cause.worth_ns for cause in causes.found}
    assert worth["slow device"] == worth["imbalance of stages"] == pytest.approx(0, abs=1)


def test_an_action_is_told_to_take_no_less_than_a_part_of_it() -> None:
    """Beside layers that take no time, actions were told to take less than without any layer."""
    beside = {Kind.F: 30_000.0, Kind.B: 60_000.0}
    seen = step([20_000.0] * DEVICES, layer_ns=[1000.0] * 16, action_ns=beside)
    told = {cause.name: cause.remedy for cause in causes_of(seen).found}["short actions"]
    assert told.startswith("an action takes 0.03 ms, 0 ms of it in its layers")


def test_a_slow_boundary_is_named_and_not_called_warm_up() -> None:
    """A boundary of 4 ms was told as a warm-up of 61 %."""
    causes = causes_of(step([MS] * DEVICES, copies=[0.0, 4 * MS, 0.0, 0.0]))
    worth = {cause.name: cause.worth_ns for cause in causes.found}
    assert causes.found[0].name == "waiting for a copy"
    assert "behind stage 1 takes 4 ms" in causes.found[0].remedy
    assert worth["warm-up and cool-down"] == pytest.approx(3 * 3 * MS)


def test_host_synchronisation_names_its_lines() -> None:
    found = causes_of(PLANTED["host synchronisation"](Random(1))).found[0]
    assert found.remedy.startswith("the host waits for a GPU at model.py:12")


def test_one_microbatch_is_told_in_the_singular() -> None:
    found = causes_of(step([MS] * DEVICES, microbatches=1)).found[0]
    assert found.remedy.startswith("1 microbatch must fill and empty 4 stages; ")


def test_one_step_of_two_that_was_held_up_is_no_cause() -> None:
    """Its times were in the costs and not in the timeline: a device was 65 times too slow."""
    usual, held_up = costs_of([MS] * DEVICES), costs_of([MS, 90 * MS, MS, MS])
    found = median_costs([held_up, usual], DEVICES)
    assert (found.forward_ns, found.backward_ns) == (usual.forward_ns, usual.backward_ns)


def test_a_kind_that_a_stage_does_not_run_has_no_time() -> None:
    usual = costs_of([MS] * DEVICES)
    costs = changed(usual, recompute_ns=[MS, *[math.nan] * 3])
    of_first = [Action(Kind.R, 0, number) for number in range(4)]
    plan = with_recompute(one_f_one_b(DEVICES, 4), of_first, usual)
    seen = Observed(plan=plan, timeline=simulate(plan, costs), costs=costs, make_plan=make_plan)
    assert "nan" not in str(report_of(seen))


def test_actions_of_no_time_have_no_changes() -> None:
    plan = one_f_one_b(2, 2)
    seen = Observed(plan, simulate(plan, Costs(MS, MS)), Costs([0.0] * 2, [0.0] * 2), make_plan)
    assert report_of(seen).changes == []


@pytest.mark.parametrize("name", PLANTED)
def test_all_tables_are_printed(name: str) -> None:
    report = report_of(PLANTED[name](Random(2)))
    # Times of layers are not known of every step.
    assert len(report.tables()) == 5 + bool(report.seen.layer_ns)
    for table in report.tables():
        assert table.title in str(report)
        assert all(len(row) == len(table.columns) for row in table.rows)


def rows_of(report: Report, title: str) -> list[tuple[str, ...]]:
    (sheet,) = (sheet for sheet in report.tables() if sheet.title.startswith(title))
    return list(sheet.rows)


def test_layers_are_told_with_their_stages() -> None:
    names = [f"layer{number}" for number in range(16)]
    seen = step([MS, MS, 4 * MS, MS], layer_names=names)
    rows = rows_of(report_of(seen), "Layers: forward")
    assert rows[8] == ("layer8", "2", "3.00", f"{4 / 28:.1%}")
    assert [row[1] for row in rows] == [str(n // 4) for n in range(16)]


def test_of_many_layers_the_longest_are_told_in_their_order() -> None:
    times = [float(number % 30) for number in range(40)]
    rows = rows_of(report_of(step([MS] * DEVICES, layer_ns=times)), "Layers: the 20 longest of 40")
    assert [int(row[0]) for row in rows] == list(range(10, 30))


def test_the_critical_path_is_a_list_and_adds_up() -> None:
    report = report_of(step([MS, MS, 4 * MS, MS], microbatches=8))
    assert report.critical_path[-1].span.end_ns == report.seen.timeline.makespan_ns
    rows = rows_of(report, "The critical path")
    assert sum(int(row[2]) for row in rows if row[2] != "-") == len(report.critical_path)
    assert rows[0][:2] == ("2", "B")
    # The stage with the most work is on the path with all its microbatches.
    assert (rows[0][2], rows[0][3]) == ("8", "64.00")
    assert rows[-1] == ("-", "gaps", "-", "0.00", "0.0%")


def test_peaks_are_told_beside_predicted_ones() -> None:
    held = [2**20 * (1 + device) for device in range(DEVICES)]
    seen = step([MS] * DEVICES, held_bytes=held, peak_bytes=[2 * one for one in held])
    rows = rows_of(report_of(seen), "Devices")
    assert [row[-2:] for row in rows] == [(f"{n}.0", f"{2 * n}.0") for n in range(1, 5)]
    on_workers = rows_of(report_of(step([MS] * DEVICES, held_bytes=held)), "Devices")
    assert {row[-1] for row in on_workers} == {"not measured"}


def test_the_hidden_part_of_copies_is_told() -> None:
    def span(start: float, end: float) -> Span:
        return Span(Action(Kind.F, 0, 0), start, end)

    work = [span(0, 10), span(5, 12), span(20, 30)]
    assert hidden_share([span(8, 16), span(28, 32)], work) == pytest.approx((4 + 2) / 12)
    assert hidden_share([], work) is None
    told = report_of(step([MS] * DEVICES, hidden_copies=0.75)).summary()
    assert told.endswith(" Some device works beside 75% of copies.")


def test_a_box_tells_the_share_of_its_operations() -> None:
    seen = step([MS] * DEVICES, flops=10**12, step_ns=1e7)
    report = report_of(seen)
    assert (report.flops_per_ns, report.flops_ratio) == (1e5, None)
    assert " The model does 100 TFLOP/s." in report.summary()
    box = load("h100x8")
    on_box = report.on_box(box)
    assert on_box.flops_ratio == pytest.approx(1e5 / (4 * 989_400), rel=1e-3)
    assert "2.5% of what the box could do (MFU)" in on_box.summary()
    assert report.on_box("h100x8") == on_box
    with pytest.raises(ValueError, match="box must have 4 devices with flops_per_ns, got 2"):
        report.on_box(load("rtx3090x2"))


CHANGED = {
    "imbalance of stages": "cut",
    "warm-up and cool-down": "microbatches",
    "slow device": "cut",
    "competing threads": "threads",
    "short actions": "microbatches",
}


@pytest.mark.parametrize("name", CHANGED)
def test_the_best_change_mends_the_planted_cause(name: str) -> None:
    report = report_of(PLANTED[name](Random(3)))
    assert report.changes[0].family == CHANGED[name]
    assert 1 <= len(report.changes) <= 3
    order = [(change.edits, -change.gain) for change in report.changes]
    assert order == sorted(order)


def test_the_prediction_of_more_microbatches_is_their_simulation() -> None:
    seen = step([MS] * DEVICES, microbatches=4, rows=8)
    (change,) = [one for one in report_of(seen).changes if one.family == "microbatches"]
    assert change.name == "microbatches=8"
    half = simulate(make_plan(None, 8), costs_of([MS / 2] * DEVICES))
    assert change.step_ns == pytest.approx(half.makespan_ns)


def test_changes_are_simulated_with_the_links() -> None:
    """A schedule was told to gain as much over a slow link as without one."""
    seen = step([MS] * DEVICES, microbatches=4, rows=8, copies=[0.0, 4 * MS, 0.0, 0.0])
    (change,) = [one for one in report_of(seen).changes if one.family == "microbatches"]
    half = simulate(make_plan(None, 8), costs_of([MS / 2] * DEVICES, [0.0, 2 * MS, 0.0, 0.0]))
    assert change.step_ns == pytest.approx(half.makespan_ns)


def test_copies_of_several_steps_have_their_median() -> None:
    of_steps = [costs_of([MS] * DEVICES, [ns, 0.0, 0.0, 0.0]) for ns in (90.0, 1.0, 2.0)]
    assert median_costs(of_steps, DEVICES).message_bytes == [2.0, 0.0, 0.0, 0.0]


def test_short_actions_want_fewer_microbatches() -> None:
    report = report_of(PLANTED["short actions"](Random(4)))
    assert report.changes[0].name == "microbatches=4"


def test_a_cut_is_for_the_measured_speeds() -> None:
    # Device 1 takes four times as long: its stage gets about a quarter of the layers of others.
    seen = step([MS, 4 * MS, MS, MS], layer_ns=ALONE)
    assert report_of(seen).changes[0].name == "balance=[5, 1, 5, 5]"


def test_the_activations_of_a_change_are_told() -> None:
    for change in report_of(PLANTED["short actions"](Random(4))).changes:
        if change.name == "microbatches=4":
            assert change.held == pytest.approx(4)


def test_no_schedule_that_is_told_needs_more_memory() -> None:
    changes = report_of(step([MS] * DEVICES, microbatches=4)).changes
    schedule = next(one for one in changes if one.family == "schedule")
    # zb_h2 has a smaller bubble, and holds twice as much as 1F1B.
    assert schedule.name == 'schedule="zb_h1"'
    assert schedule.held == pytest.approx(1)

"""Reports of Nsight Systems are read back: exports made by hand, of all schedules and of GPUs."""

import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.cli import app
from pykern.nsight import read, record
from pykern.nsight.export import tables_of
from pykern.nsight.tables import steps_of
from pykern.plan import Costs, Kind, Span, Timeline, simulate
from pykern.plan.halves import forwards_first
from pykern.recorded.profile import timeline_of
from pykern.schedules import one_f_one_b
from tests.nsight.exports import AUTOGRAD, MS, Export, payload
from tests.support.recordings import (
    COSTS,
    PLANS,
    STEPS,
    assert_as_kernels,
    assert_read_back,
    assert_usual,
)


@pytest.fixture
def export(tmp_path: Path) -> Export:
    return Export(tmp_path / "step.sqlite")


def saved(export: Export, tmp_path: Path) -> Path:
    export.close()
    return tmp_path / "step.sqlite"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_and_its_times_are_read_back(export, tmp_path, plan):
    timeline = simulate(plan, COSTS)
    export.steps([timeline, timeline])
    with tables_of(saved(export, tmp_path)) as tables:
        steps = steps_of(tables)
    assert len(steps) == 2
    assert_read_back(timeline_of(steps[1]), plan, timeline)


def test_the_profile_has_the_costs_and_the_most_frequent_steps(export, tmp_path):
    export.steps(STEPS)
    # Ranges of other domains, and of other text, are not pykern's.
    export.range("step", 0, 1e12, domain=1)
    assert_usual(read(saved(export, tmp_path)))


@pytest.mark.parametrize("between", [0, 50 * MS])
def test_a_backward_through_an_output_counts_with_its_forward(export, tmp_path, between):
    plan = forwards_first(one_f_one_b(2, 4))
    whole = simulate(plan, COSTS)
    # The second half begins when all forwards are through, as it does in a pipeline.
    forwards = [[span for span in row if span.action.kind is Kind.F] for row in whole.rows]
    last = max(span.end_ns for row in forwards for span in row)
    backwards = [[span for span in row if span.action.kind is not Kind.F] for row in whole.rows]
    first = min(span.start_ns for row in backwards for span in row)
    for _ in range(2):
        export.steps([Timeline(forwards)])
        export.skip(between)
        export.steps([Timeline([[since(span, first) for span in row] for row in backwards])])
        export.skip(between)
    report = read(saved(export, tmp_path))
    assert report.seen.num_steps == 2
    assert report.seen.plan == plan
    assert report.seen.timeline.makespan_ns == last + whole.makespan_ns - first
    assert report.more == []


def since(span: Span, ns: float) -> Span:
    return Span(span.action, span.start_ns - ns, span.end_ns - ns)


def on_gpus(export: Export) -> None:
    """F, copy and B of one microbatch, of two stages: issued within 7 us, and run for 10 ms."""
    export.range("step", 0, 7_000)
    kernel, copy = "KERNEL", "MEMCPY"
    issued = [
        ("F s0", payload(0, 0, 0), [(kernel, 0, 1), (kernel, 1, 2)]),
        ("COPY_F s0", payload(0, 0, 0), [(copy, 2, 3)]),
        ("F s1", payload(1, 1, 0), [(kernel, 3, 5)]),
        ("B s1", payload(1, 1, 0), [(kernel, 5, 8)]),
        ("COPY_B s1", payload(1, 1, 0), [(copy, 7, 9)]),
        ("B s0", payload(0, 0, 0), [(kernel, 9, 10)]),
    ]
    for number, (text, of, work) in enumerate(issued):
        start = 1_000 * number + 10
        if number == 0:
            export.registered(text, start, start + 500, of)
        else:
            export.range(text, start, start + 500, of)
        # Threads of autograd issue the kernels of a backward.
        thread = AUTOGRAD if text.startswith("B ") else None
        for table, begin, end in work:
            args = (table, start + 100, begin * MS, end * MS)
            export.work(*args) if thread is None else export.work(*args, thread=thread)
    # Work that no action has issued.
    export.work(kernel, 6_900, 20 * MS, 30 * MS)


def test_on_gpus_an_action_lasts_as_its_kernels_do(export, tmp_path):
    on_gpus(export)
    report = read(saved(export, tmp_path))
    assert_as_kernels(report)
    assert report.seen.costs.forward_ns == [2 * MS, 2 * MS]
    # Each boundary's copies, as bytes at a byte for each nanosecond.
    assert report.seen.costs.message_bytes == [1.5 * MS, 0]


def test_each_kernel_and_copy_is_drawn_with_its_action(export, tmp_path):
    """Their sums alone were told, in a table."""
    on_gpus(export)
    report = read(saved(export, tmp_path))

    def spans(name: str) -> list[list[tuple[str, float, float]]]:
        rows = report.timelines()[name].rows
        return [[(str(of.action), of.start_ns / MS, of.end_ns / MS) for of in row] for row in rows]

    assert list(report.timelines()) == ["planned", "measured", "kernels", "copies"]
    assert spans("kernels") == [
        [("0F0", 0, 1), ("0F0", 1, 2), ("0B0", 9, 10)],
        [("1F0", 3, 5), ("1B0", 5, 8)],
    ]
    assert spans("copies") == [[("0COPY_F0", 2, 3)], [("1COPY_B0", 7, 9)]]
    page, trace, picture = (tmp_path / name for name in ("a.html", "a.json", "a.svg"))
    report.save_html(page)
    report.save_picture(picture)
    report.save_trace(trace)
    assert '"label":"kernels"' in page.read_text()
    assert "copies" in picture.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    # The microbatch in flight, from its F to the end of its B, though F has two kernels.
    kernels = list(report.timelines()).index("kernels")
    flights = [
        (event["ts"], event["args"]["microbatches"])
        for event in events
        if event["ph"] == "C" and event["pid"] == kernels and event["name"].endswith("0")
    ]
    assert flights == [(0.0, 1.0), (10_000.0, 0.0)]


def test_each_rank_leaves_a_report_of_its_own(tmp_path):
    """By the recipe of torchrun: a report for each rank, whose processes have other numbers."""
    timelines = [simulate(one_f_one_b(2, 4), Costs(of * MS, 2 * of * MS)) for of in (1, 3)]
    for rank, timeline in enumerate(timelines):
        export = Export(tmp_path / f"step{rank}.sqlite", rank)
        export.steps([timeline, timeline])
        export.close()
    for rank, timeline in enumerate(timelines):
        seen = read(tmp_path / f"step{rank}.sqlite").seen
        assert (seen.num_steps, seen.plan) == (2, one_f_one_b(2, 4))
        assert seen.timeline.makespan_ns == timeline.makespan_ns


def test_steps_of_ranks_in_one_report_may_overlap(tmp_path):
    """By nsys in front of torchrun: one report of all ranks, which are at work at once."""
    path = tmp_path / "step.sqlite"
    timeline = simulate(one_f_one_b(2, 4), COSTS)
    for rank in range(2):
        export = Export(path, rank)
        export.skip(rank * MS)
        export.steps([timeline])
        export.close()
    seen = read(path).seen
    assert seen.num_steps == 2
    assert seen.timeline.makespan_ns == timeline.makespan_ns


def test_a_report_without_steps_is_refused(export, tmp_path):
    export.range("step", 0, 100)
    with pytest.raises(
        ValueError, match="must have a step of a pipeline with its actions, got 1 step without"
    ):
        read(saved(export, tmp_path))


def test_half_a_step_is_refused(export, tmp_path):
    whole = simulate(one_f_one_b(2, 2), COSTS)
    export.steps([Timeline([whole.rows[0], whole.rows[1][:1]])])
    with pytest.raises(ValueError, match="the actions of a step must make a plan"):
        read(saved(export, tmp_path))


@pytest.mark.parametrize(
    ("text", "end", "rule"),
    [
        ("X s0", 20, "recording must name the actions that pykern has, got 'X s0'"),
        ("F s0", 10, "actions of a step must take time, got 0 ns"),
    ],
)
def test_an_action_that_cannot_be_is_refused(export, tmp_path, text, end, rule):
    """These were a KeyError, and a division by zero."""
    export.range("step", 0, 100)
    export.range(text, 10, end, payload(0, 0, 0))
    with pytest.raises(ValueError, match=rule):
        read(saved(export, tmp_path))


def test_words_of_nsys_in_another_encoding_are_told(tmp_path, monkeypatch):
    """Python's own words about bytes were told in the place of those of nsys."""
    nsys, report = tmp_path / "nsys", tmp_path / "step.nsys-rep"
    nsys.write_bytes(b"#!/bin/sh\nprintf 'no report: step\\351\\n' >&2\nexit 1\n")
    nsys.chmod(0o755)
    report.write_text("no report")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ValueError, match=r"got step\.nsys-rep: no report: step\ufffd"):
        read(report)


def test_other_files_are_refused(tmp_path, monkeypatch):
    text = tmp_path / "step.txt"
    text.write_text("no report")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="nsys must be on the PATH, got no such command"):
        read(text)
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_text("no export")
    with pytest.raises(ValueError, match=r"must be an export .*, got damaged\.sqlite, which is"):
        read(damaged)
    empty = tmp_path / "other.sqlite"
    with sqlite3.connect(empty) as tables:
        tables.execute("CREATE TABLE NVTX_EVENTS (start INTEGER)")
    with pytest.raises(ValueError, match="must have the tables of Nsight Systems"):
        read(empty)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere.nsys-rep")


def test_the_command_prints_the_profile_and_writes_its_files(export, tmp_path):
    export.steps([simulate(one_f_one_b(2, 4), COSTS)])
    report = saved(export, tmp_path)
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    command = ["nsys", "--html", str(page), "--trace", str(trace), str(report)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "Why a step takes its time" in done.output
    assert page.stat().st_size > 1000
    assert "0F0" in trace.read_text()


def test_a_recording_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.touch()
    report = tmp_path / "step.nsys-rep"
    with pytest.raises(ValueError, match=r"report must end in \.nsys-rep, got step\.txt"):
        record(tmp_path / "step.txt", [str(script)])
    report.touch()
    with pytest.raises(ValueError, match=r"report must be a new file, got step\.nsys-rep"):
        record(report, [str(script)])
    report.unlink()
    with pytest.raises(ValueError, match=r"script must be a file, got nowhere\.py"):
        record(report, ["nowhere.py"])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="nsys must be on the PATH"):
        record(report, [str(script)])
    tool = tmp_path / "nsys"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="got exit code 3 and no recording"):
        record(report, [str(script)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nsys", "train.py"]

"""Traces of torch.profiler are read back: traces made by hand, of schedules and of GPUs."""

import gzip
import json
import os
import threading
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pykern.cli import app
from pykern.kineto import chrome_trace, read
from pykern.kineto.chrome_trace import events_of
from pykern.kineto.ranges import steps_of
from pykern.plan import simulate
from pykern.recorded.profile import timeline_of
from pykern.schedules import one_f_one_b
from tests.kineto.traces import AUTOGRAD, CALLER, Trace
from tests.support.recordings import (
    COSTS,
    PLANS,
    STEPS,
    assert_as_kernels,
    assert_read_back,
    assert_usual,
)

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("told", [False, True], ids=["on workers", "told by the caller"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_and_its_times_are_read_back(tmp_path, plan, told):
    timeline, trace = simulate(plan, COSTS), Trace()
    trace.steps([timeline, timeline], told=told)
    steps = steps_of(events_of(trace.save(tmp_path / "step.json")))
    assert len(steps) == 2
    assert_read_back(timeline_of(steps[1]), plan, timeline)


def test_the_profile_is_that_of_the_most_frequent_steps(tmp_path):
    trace = Trace()
    trace.steps(STEPS)
    # Ranges of others, rows of GPUs, and another process.
    trace.range("steps of mine", 0, 1e9)
    trace.add("gpu_user_annotation", "pykern step", 0, 1e9)
    trace.range("F s7 mb0 dev7", 20, 30, pid=CALLER + 1)
    assert_usual(read(trace.save(tmp_path / "step.json")))


def on_gpus(*, by_graphs: bool = False) -> Trace:
    """F, copy and B of one microbatch, of two stages: issued within 7 us, and run for 10 ms."""
    trace = Trace()
    trace.range("step", 0, 7)
    kernel, copy = "kernel", "gpu_memcpy"
    issued = [
        ("F s0 mb0 dev0", [(kernel, 0, 1), ("gpu_memset", 1, 2)]),
        ("COPY_F s0 mb0 dev0", [(copy, 2, 3)]),
        ("F s1 mb0 dev1", [(kernel, 3, 5)]),
        ("B s1 mb0 dev1", [(kernel, 5, 8)]),
        ("COPY_B s1 mb0 dev1", [(copy, 7, 9)]),
        ("B s0 mb0 dev0", [(kernel, 9, 10)]),
    ]
    for start, (text, work) in enumerate(issued):
        trace.range(text, start + 0.01, start + 0.5)
        # Threads of autograd issue the kernels of a backward.
        thread = AUTOGRAD if text.startswith("B ") else CALLER
        for category, begin, end in work:
            if by_graphs:
                trace.launched(category, (begin * 1e3, end * 1e3))
            else:
                trace.work(category, start + 0.1, (begin * 1e3, end * 1e3), tid=thread)
    # Work that no action has issued, and work whose call is not in the trace.
    trace.work(kernel, 6.9, (20e3, 30e3))
    trace.add(kernel, "another", 0, 40e3, pid=0, args={"correlation": 99})
    return trace


@pytest.mark.parametrize("by_graphs", [False, True], ids=["called", "by graphs"])
def test_on_gpus_an_action_lasts_as_its_kernels_do(tmp_path, by_graphs):
    assert_as_kernels(read(on_gpus(by_graphs=by_graphs).save(tmp_path / "step.json")))


def test_threads_that_issue_at_once_have_the_work_of_their_calls(tmp_path):
    trace = Trace()
    trace.range("step", 0, 10)
    for device in range(2):
        trace.range(f"F s{device} mb0 dev{device}", 1 + device, 8, tid=device + 1)
    for device in range(2):
        trace.work("kernel", 4 + device, (20 + 10 * device, 30 + 10 * device), tid=device + 1)
    [step] = steps_of(events_of(trace.save(tmp_path / "step.json")))
    assert [one.gpu_ns for one in step.ran] == [(20_000, 30_000), (30_000, 40_000)]


@pytest.mark.parametrize("way", ["called", "graph"])
def test_steps_of_a_gpu_are_those_of_its_kernels(way):
    """Two steps of 1F1B by four devices on one H100, four microbatches; other programs ran too.

    Recorded by torch 2.11. Names are cut, and events that nothing reads are left out.
    """
    events = events_of(RECORDED / f"h100-{way}.json.gz")
    steps = steps_of(events)
    work = [event for event in events if event.category in {"kernel", "gpu_memcpy", "gpu_memset"}]
    assert [sum(map(len, timeline_of(step).rows)) for step in steps] == [32, 32]
    spans = [[ran.gpu_ns for ran in step.ran if ran.gpu_ns is not None] for step in steps]
    for step, of_gpu in zip(steps, spans, strict=True):
        # Four copies each way between neighbours, and times by the GPU's clock for every action.
        assert len(of_gpu) == len(step.ran) == 32 + 2 * 3 * 4
        makespan_ns = max(end for _, end in of_gpu) - min(start for start, _ in of_gpu)
        assert timeline_of(step).makespan_ns == makespan_ns
        assert 38e6 < makespan_ns < 50e6
    # All but the caller's own copies of the batch and sums of losses.
    within = [any(start <= event.start_ns <= end for start, end in chain(*spans)) for event in work]
    assert sum(within) / len(work) > 0.95


@pytest.mark.parametrize("texts", [[], ["step"], ["F s0 mb0 dev0"]])
def test_a_trace_without_steps_is_refused(tmp_path, texts):
    trace = Trace()
    for text in texts:
        trace.range(text, 0, 100)
    with pytest.raises(
        ValueError,
        match=r"must have a step of a pipeline with its actions, got (0 steps|1 step) without",
    ):
        read(trace.save(tmp_path / "step.json"))


@pytest.mark.parametrize("text", ["X s0 mb0 dev0", "F s99999 mb0 dev0", "F s0 mb9999999999 dev0"])
def test_an_action_that_cannot_be_is_refused(tmp_path, text):
    trace = Trace()
    trace.range("step", 0, 100)
    trace.range(text, 10, 20)
    with pytest.raises(
        ValueError, match=f"recording must name the actions that pykern has, got 'pykern {text}'"
    ):
        read(trace.save(tmp_path / "step.json"))


def test_part_of_a_step_is_refused(tmp_path):
    trace = Trace()
    trace.range("step", 0, 100)
    trace.range("F s0 mb0 dev0", 10, 20)
    trace.range("B s1 mb0 dev65535", 30, 40)
    with pytest.raises(ValueError, match="the actions of a step must make a plan"):
        read(trace.save(tmp_path / "step.json"))


def test_steps_at_once_are_refused(tmp_path):
    """Actions went to the step of another thread, and a part of a plan was read as a whole one."""
    trace = Trace()
    trace.range("step", 0, 100)
    trace.range("F s0 mb0 dev0", 10, 20)
    trace.range("step", 30, 130, tid=CALLER + 9)
    with pytest.raises(ValueError, match="steps of a process must follow each other"):
        read(trace.save(tmp_path / "step.json"))


EVENT = {"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "ts": 1, "dur": 1}


def of_events(*events: object) -> bytes:
    return json.dumps({"traceEvents": events}).encode()


MALFORMED = {
    "text": (b"no trace", "the text must be JSON, got 'n' at line 1, column 1"),
    "nothing": (b"", "the text must be JSON, got its end at line 1, column 1"),
    "a list": (b"[]", "traceEvents must be a list in an object"),
    "no events": (b"{}", "traceEvents must be a list in an object"),
    "events that are a number": (b'{"traceEvents": 1}', "traceEvents must be a list in an object"),
    "an event that is a number": (of_events(1), "an event must be an object, got a int"),
    "no time": (of_events(EVENT | {"ts": None}), "ts of event 'a' must be a number"),
    "a time that is text": (of_events(EVENT | {"ts": "1"}), "ts of event 'a' must be a number"),
    "an infinite time": (of_events(EVENT | {"ts": float("inf")}), "number up to 1e18, got inf"),
    "a time that no float holds": (of_events(EVENT | {"dur": 10**400}), r"up to 1e18, got 1000.*"),
    "nanoseconds that none holds": (of_events(EVENT | {"ts": 1e306}), r"up to 1e18, got 1e\+306"),
    "a long number": (of_events(10**1000), "numbers must have at most 640 digits, got 1001"),
    "no end": (of_events({"ph": "X", "name": "a", "pid": 1, "ts": 1}), "an event lacks 'dur'"),
    "deep": (b"[" * 100_000, "its lists and objects have too many levels"),
    "other letters": (b"\xff\xfe\x00", "the text must be UTF-8, got byte 255 at offset 0"),
    "half of a compressed one": (gzip.compress(b"{}" * 1000)[:20], "compressed text is cut off"),
    "compressed and changed": (gzip.compress(b"{}")[:-4] + b"1234", "compressed text is cut off"),
    "compressed, with another form": (b"\x1f\x8b\x08\x00" + b"\xff" * 40, "text is cut off"),
}


@pytest.mark.parametrize(("content", "told"), MALFORMED.values(), ids=MALFORMED)
def test_other_files_are_refused_by_name(tmp_path, content, told):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    expected = rf"must be a trace by torch.profiler's .*, got .*other\.json: .*{told}"
    with pytest.raises(ValueError, match=expected):
        read(path)
    done = CliRunner().invoke(app, ["trace", str(path)])
    assert done.exit_code == 2
    assert "other.json" in done.output


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_a_trace_may_come_through_a_pipe(tmp_path, packed):
    """The first bytes were lost, as the pipe was opened twice."""
    trace = Trace()
    trace.steps(STEPS)
    content = packed(trace.save(tmp_path / "step.json").read_bytes())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    try:
        found = read(pipe)
    finally:
        writer.join()
    assert found.seen.plan == read(tmp_path / "step.json").seen.plan


def test_a_trace_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(chrome_trace, "_MOST_BYTES", 999)
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(b" " * 1000))
    with pytest.raises(ValueError, match=r"step\.json\.gz: its text must be at most 2 GiB"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere.json")


def test_the_command_prints_the_profile_and_writes_its_files(tmp_path: Path):
    trace = Trace()
    trace.steps([simulate(one_f_one_b(2, 4), COSTS)])
    plain = trace.save(tmp_path / "prof.json")
    zipped = tmp_path / "prof.json.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    page, out = tmp_path / "step.html", tmp_path / "step.json"
    done = CliRunner().invoke(app, ["trace", "--html", str(page), "--trace", str(out), str(zipped)])
    assert done.exit_code == 0, done.output
    assert "Why a step takes its time" in done.output
    assert page.stat().st_size > 1000
    assert "0F0" in out.read_text()
    assert done.output.startswith(CliRunner().invoke(app, ["trace", str(plain)]).output.rstrip())


def test_the_command_has_a_help():
    done = CliRunner().invoke(app, ["trace", "--help"])
    assert done.exit_code == 0
    assert "Read a trace of torch.profiler back" in done.output
    for option in ("--html", "--trace", "RECORDING"):
        assert option in done.output


def test_errors_behind_the_events_name_the_file(tmp_path):
    """Times of a timeline, and names of actions, were refused without the file's name."""
    trace = Trace()
    trace.range("step", 0, 100)
    trace.range("F s0 mb0 dev0", 20, 10)
    with pytest.raises(ValueError, match=r"back\.json: dur of event 'pykern F s0 mb0 dev0' must"):
        read(trace.save(tmp_path / "back.json"))
    trace.events.pop()
    trace.range("X s0 mb0 dev0", 10, 20)
    with pytest.raises(ValueError, match=r"other\.json: the recording must name the actions"):
        read(trace.save(tmp_path / "other.json"))

"""Drawings are right, share one time scale, and survive any label."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pykern._C import Shades
from pykern.plan import Action, Costs, Placement, Span, Timeline, by_phases, by_slots, simulate
from pykern.plan.drawing import as_text, save_chrome_trace, save_picture
from pykern.schedules import gpipe

HOSTILE = [
    "",
    "$\\frac{1}{",
    "[red]not markup[/nor this]",
    "<script>alert('&')</script>]]>",
    "two\nlines\r\x00\x1b[31m\ud800",
    "x" * 10_000,
]


def one_f_one_b() -> Timeline:
    plan = by_slots(Placement.linear(2), 2, group=1, group_offset=2)
    return simulate(plan, Costs(1e6, 2e6))


def two_chunks() -> Timeline:
    plan = by_phases(Placement.looped(2, 2), 2, warmup=[4, 3], group=2)
    return simulate(plan, Costs(1, 1))


def spans(*rows: str) -> Timeline:
    """Rows like "0F0@0-1 0B0@1-3": action, start and end."""
    return Timeline(
        [
            [
                Span(Action.parse(text), float(start), float(end))
                for text, start, end in (re.split("[@-]", word) for word in row.split())
            ]
            for row in rows
        ]
    )


def test_the_terminal_drawing_is_to_scale() -> None:
    assert as_text({"predicted": one_f_one_b()}, width=56).plain.split("\n") == [
        "predicted  makespan 9 ms, bubble ratio 0.333",
        "device 0 |0F0--0F1--          0B0=======     0B1=======|",
        "device 1 |     1F0--1B0=======1F1--1B1=======          |",
        "F-- forward   B== backward   blank: idle",
    ]


def test_cells_too_small_for_their_number_still_tell_the_kind() -> None:
    lines = as_text({"predicted": one_f_one_b()}, width=1).plain.split("\n")
    assert lines[1:3] == [
        "device 0 |FF1    B0=  B1==|",
        "device 1 | F0B0==FB1==    |",
    ]


def test_timelines_are_drawn_on_one_scale() -> None:
    slow = Timeline([[Span(Action.parse("0F0"), 0, 40)]])
    fast = Timeline([[Span(Action.parse("0F0"), 100, 110)]])
    lines = as_text({"measured": slow, "predicted": fast}, width=51).plain.split("\n")
    assert lines[1] == "device 0 |0F0-------------------------------------|"
    assert lines[3] == "device 0 |0F0-------                              |"


@pytest.mark.parametrize(("num_devices", "lines"), [(128, 128), (129, 129), (1000, 129)])
def test_lines_that_nobody_can_look_through_are_not_made(num_devices: int, lines: int) -> None:
    timeline = spans(*[f"{device}F0@{device}-{device + 1}" for device in range(num_devices)])
    drawn = as_text({"": timeline}, width=60).plain.split("\n")[1:-1]
    assert len(drawn) == lines
    assert drawn[0].startswith("device 0 ")
    assert drawn[-1].startswith(f"device {num_devices - 1} ")
    if lines > 128:
        assert drawn[64] == f"... {num_devices - 128} more of {num_devices} devices ..."
        assert drawn[65].startswith(f"device {num_devices - 64} ")


def test_a_drawing_asks_for_a_few_spans_of_each_column_however_many_there_are() -> None:
    """Counted: what is handed over for a line of 100 columns."""
    plan = by_slots(Placement.linear(2), 5000, group=1, group_offset=2)
    timeline = simulate(plan, Costs(1, 2))
    seen = timeline.visible(0, 0.0, 100 / timeline.makespan_ns)
    assert sum(map(len, timeline.rows)) == 20_000
    assert 100 <= len(seen) <= 102


@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 120), st.booleans())
def test_what_is_not_seen_is_not_missed(
    num_devices: int, num_microbatches: int, columns: int, costly: bool
) -> None:
    """The last span that covers a column, cut or not."""
    plan = by_slots(Placement.linear(num_devices), num_microbatches, group=1, group_offset=2)
    timeline = simulate(plan, Costs(7, 2) if costly else Costs(1, 3, 0.5))
    scale = columns / timeline.makespan_ns

    def covers(row: Iterable[Span]) -> dict[int, str]:
        found = {}
        for span in row:
            first = int(span.start_ns * scale)
            for column in range(first, max(int(span.end_ns * scale), first + 1)):
                found[column] = str(span.action)
        return found

    for device, row in enumerate(timeline.rows):
        assert covers(timeline.visible(device, 0.0, scale)) == covers(row)


@given(st.integers(-5, 200))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in as_text({"": two_chunks()}, width).plain.split("\n")[1:-1]:
        assert len(line) == max(width, 27)


def test_every_kind_has_its_letter_and_its_fill() -> None:
    timeline = spans("0F0@0-5 0R0@5-10 0I0@10-15 0W0@15-20", "0F0.1@0-5 0B0@5-10 0U0@10-15")
    assert as_text({"": timeline}, width=47).plain.split("\n")[1:] == [
        "device 0 |0F0------0R0......0I0::::::0W0++++++|",
        "device 1 |0F0.1----0B0======0U0~~~~~~         |",
        "F-- forward   R.. recompute   B== backward   I:: input gradient   W++ weight gradient   "
        "U~~ update   blank: idle",
    ]


def test_a_pair_shares_its_slot() -> None:
    timeline = spans("0F0@0-10 0F1@10-20 0B0@10-20 0B1@20-30")
    assert as_text({"": timeline}, width=41).plain.split("\n")[1] == (
        "device 0 |0F0-------0F1--0B0==0B1=======|"
    )


def test_actions_without_a_duration_are_no_pair_and_hide_no_text() -> None:
    timeline = spans("0F0@0-10 0U0@10-10 0U1@10-10 0F1@10-20")
    assert as_text({"": timeline}, width=31).plain.split("\n")[1] == (
        "device 0 |0F0-------0F1-------|"
    )


def bands(timeline: Timeline, path: Path) -> list[tuple[float, float]]:
    """Middle and height of every cell of the picture."""
    save_picture({"": timeline}, path)
    found = re.findall(r"M[\d.]+ ([\d.]+)h[\d.]+v([\d.]+)", "".join(shapes(path)))
    return [(float(top) + float(height) / 2, float(height)) for top, height in found]


def shapes(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return [element.get("d", "") for element in root.iter() if element.get("stroke") == "#fff"]


def test_a_pair_has_two_halves_of_a_cell(tmp_path: Path) -> None:
    whole = bands(spans("0F0@0-10 0F1@10-20"), tmp_path / "a.svg")
    (upper, half), (lower, _) = bands(spans("0F1@10-20 0B0@10-20"), tmp_path / "b.svg")
    ((middle, height),) = set(whole)
    assert upper < middle < lower
    assert upper + lower == pytest.approx(2 * middle)
    assert half == pytest.approx(height / 2)


def test_replicas_differ_in_shade_on_each_device() -> None:
    timeline = spans("0F0@0-10 1F1@10-20", "0F1@0-10 1F0@10-20")
    text = as_text({"": timeline}, width=31)
    styles = {text.plain[span.start : span.start + 3]: str(span.style) for span in text.spans}
    assert styles["0F0"] == styles["1F0"]
    assert styles["0F1"] == styles["1F1"] != styles["0F0"]
    shades = Shades(timeline)
    assert (shades.num_replicas, shades.num_chunks) == (2, 1)


def test_chunks_differ_in_colour() -> None:
    text = as_text({"predicted": two_chunks()}, width=80)
    styles = {text.plain[span.start : span.start + 3]: str(span.style) for span in text.spans}
    cells = ["0F0", "2F0", "0B0", "2B0"]
    assert len({styles[cell] for cell in cells}) == 4


@pytest.mark.parametrize("label", HOSTILE)
def test_any_label_stays_on_one_line_of_the_terminal(label: str) -> None:
    text = as_text({label: one_f_one_b()}, width=60)
    assert len(text.plain.split("\n")) == 4
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    console.print(text)
    assert "\x1b[31m" not in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("label", HOSTILE)
def test_any_label_makes_a_well_formed_picture(label: str, tmp_path: Path) -> None:
    timelines = {label: one_f_one_b(), "predicted": two_chunks()}
    save_picture(timelines, tmp_path / "plan.svg")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")
    save_picture(timelines, str(tmp_path / "plan.PNG"))
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_picture_has_a_cell_for_every_action(tmp_path: Path) -> None:
    save_picture({"predicted": one_f_one_b()}, tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert sum(path.count("z") for path in shapes(tmp_path / "plan.svg")) == 8
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"F0", "F1", "B0", "B1"} <= set(words)


@pytest.mark.parametrize("name", ["plan.svg", "plan.png", "plan.pdf"])
def test_the_same_timeline_makes_the_same_file(name: str, tmp_path: Path) -> None:
    files = [tmp_path / folder / name for folder in "ab"]
    for path in files:
        path.parent.mkdir()
        save_picture({"1F1B": one_f_one_b(), "two": two_chunks()}, path)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["plan", "plan.gif", "png"])
def test_other_files_than_pictures_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.png, \.pdf or \.svg, got .*" + name):
        save_picture({"predicted": one_f_one_b()}, tmp_path / name)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install pykern-runtime\[viz\]"):
        save_picture({"predicted": one_f_one_b()}, tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_with_the_first_picture_only() -> None:
    code = "import sys, pykern.plan.drawing; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("label", HOSTILE)
def test_a_chrome_trace_has_processes_threads_and_spans(label: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_chrome_trace({label: one_f_one_b(), "predicted": two_chunks()}, path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert names == {
        ("process_name", 0, None): label,
        ("thread_name", 0, 0): "device 0",
        ("thread_name", 0, 1): "device 1",
        ("process_name", 1, None): "predicted",
        ("thread_name", 1, 0): "device 0",
        ("thread_name", 1, 1): "device 1",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8 + 16
    assert spans[2] == {
        "name": "0B0",
        "cat": "B",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 4000.0,
        "dur": 2000.0,
        "args": {"stage": 0, "microbatch": 0, "slice": 0},
    }


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def fail(_: object, file: io.TextIOBase) -> None:
        file.write("half")
        raise OSError("no space left")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="no space left"):
        save_chrome_trace({"predicted": one_f_one_b()}, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_arrows_of_a_chrome_trace_lead_from_stage_to_stage(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    # Split backwards, and two chunks, of which the first of device 1 hands over to device 0.
    measured = spans("0F0@0-10 2F0@22-30 2I0@30-40 0B0@60-70", "1F0@12-20 1I0@42-50")
    save_chrome_trace({"measured": measured, "copies": spans("0COPY_F0@10-12")}, path)
    arrows = [
        (event["id"], event["ph"], event["tid"], event["ts"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event["ph"] in "sf"
    ]
    ends = [(arrow[2:], other[2:]) for arrow, other in zip(arrows[::2], arrows[1::2], strict=True)]
    assert sorted(ends) == [
        ((0, 0.01), (1, 0.012)),
        ((0, 0.04), (1, 0.042)),
        ((1, 0.02), (0, 0.022)),
        ((1, 0.05), (0, 0.06)),
    ]
    assert [phase for _, phase, *_ in arrows] == ["s", "f"] * 4
    assert len({name for name, *_ in arrows}) == 4


@pytest.mark.parametrize("timelines", [{}, {"nothing ran": Timeline([[], []])}])
def test_nothing_to_draw_is_refused(timelines: dict[str, Timeline], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="timelines must hold at least one with an action in it, got none"
    ):
        as_text(timelines)
    with pytest.raises(
        ValueError, match="timelines must hold at least one with an action in it, got none"
    ):
        save_picture(timelines, tmp_path / "plan.png")
    with pytest.raises(
        ValueError, match="timelines must hold at least one with an action in it, got none"
    ):
        save_chrome_trace(timelines, tmp_path / "trace.json")


def test_a_timeline_without_a_name_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"timelines must be a dict of timelines by name, got a Timeline\. Give"
    ):
        as_text(Timeline([[Span(Action.parse("0F0"), 0, 5)]]))  # type: ignore[arg-type]
    timeline = Timeline([[Span(Action.parse("0F0"), 0, 5)]])
    others: list[Any] = [{"plan": gpipe(2, 2)}, {"none": None, "measured": timeline}, {1: timeline}]
    for timelines in others:
        with pytest.raises(TypeError, match="timelines must be a dict of timelines by name, got a"):
            as_text(timelines)


def test_actions_that_take_no_time_are_drawn(tmp_path: Path) -> None:
    timeline = Timeline([[Span(Action.parse("0F0"), 5, 5)], []])
    assert as_text({"measured": timeline}).plain.split("\n")[1].startswith("device 0 |F ")
    save_picture({"measured": timeline}, tmp_path / "plan.png")


def test_an_action_without_a_duration_is_a_thin_line_in_a_picture(tmp_path: Path) -> None:
    save_picture({"": spans("0F0@0-10 0U0@10-10")}, tmp_path / "plan.svg")
    widths = re.findall(r"h([\d.]+)v", "".join(shapes(tmp_path / "plan.svg")))
    assert widths == ["784", "2"]


def step_with_copies() -> dict[str, Timeline]:
    return {
        "measured": spans("0F0@0-10 0B0@30-40", "1F0@12-20 1B0@20-28"),
        "copies": spans("0COPY_F0@10-12", "1COPY_B0@28-30"),
    }


def test_copies_stand_below_their_step_in_its_time() -> None:
    assert as_text(step_with_copies(), width=51).plain.split("\n")[:6] == [
        "measured  makespan 40 ns, bubble ratio 0.550",
        "device 0 |0F0-------                    0B0=======|",
        "device 1 |            1F0-----1B0=====            |",
        "copies  2 copies, 2 ns each on average",
        "F of 0   |          C~                            |",
        "B of 1   |                            C~          |",
    ]


def test_copies_alone_are_drawn_in_the_time_of_their_step(tmp_path: Path) -> None:
    save_picture({"": step_with_copies()["copies"]}, tmp_path / "copies.svg")
    bars = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", "".join(shapes(tmp_path / "copies.svg")))
    # The axis has 30 ns that are 784 points wide, from 62 on.
    assert bars == [("323.33", "52.27"), ("793.73", "52.27")]


def test_a_row_of_copies_has_the_name_of_what_it_carries(tmp_path: Path) -> None:
    many = spans("0COPY_F0@0-1 2COPY_F0@1-2 4COPY_F0@2-3", "1COPY_B0@0-1 3COPY_B0@1-2")
    path = tmp_path / "trace.json"
    save_chrome_trace({"copies": many}, path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["F of 0, 2, …", "B of 1, 3"]

"""The page of a profile: one file, complete, escaped, and the command that writes it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from pykern.cli import app
from pykern.plan import Costs, simulate
from pykern.profiling import report_of
from pykern.profiling.page import save_page
from pykern.profiling.tables import Sheet
from pykern.schedules import one_f_one_b
from tests.profiling.planted import PLANTED

HOSTILE = "</script><script>alert('&')</script><!--\x00\ud800é"


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.data: Any = None
        self.feed(path.read_text(encoding="ascii"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and self.data is None:
            self.data = json.loads(data)
        elif self.tags[-1:] not in (["script"], ["style"]):
            self.texts.append(data)


def test_a_page_may_be_larger_than_the_file_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a large step was refused at the end of a run, as a plan's file would be."""
    monkeypatch.setattr("pykern.plan.files.MAX_FILE_BYTES", 1000)
    report_of(PLANTED["slow device"](Random(5))).save_html(tmp_path / "page.html")
    assert "planned" in (tmp_path / "page.html").read_text()


def test_the_text_of_a_report_is_plain_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the text was empty, and with FORCE_COLOR it had codes of a terminal."""
    report = report_of(PLANTED["slow device"](Random(5)))
    plain = str(report)
    assert "Why a step takes its time" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(report) == plain
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(report) == plain


def test_the_page_has_all_tables_and_both_timelines(tmp_path: Path) -> None:
    report = report_of(PLANTED["slow device"](Random(5)))
    report.save_html(tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert page.tags.count("table") == 6
    for table in report.tables():
        assert table.title in page.texts
        assert {cell for row in table.rows for cell in row if cell} <= set(page.texts)
    assert report.summary() in page.texts
    planned, measured = page.data["timelines"]
    assert (planned["label"], measured["label"]) == ("planned", "measured")
    spans = [span for row in measured["rows"] for span in row["spans"]]
    assert len(spans) == report.seen.plan.num_actions
    assert planned["rows"][0]["spans"][0] == [0, 1000, "F", 0, 0, 0]
    assert set(page.data["kinds"]) == {"F", "B"}


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    report_of(PLANTED["slow device"](Random(5))).save_html(tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert not {"src", "href"} & page.attributes.keys()
    assert page.attributes["content"][-1].startswith("default-src 'none'")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|@import|fetch\(|import\(", text)
    # All colours, texts and sizes that the script asks for are there.
    assert text.count("<script") == 2


def test_names_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    timeline = simulate(one_f_one_b(2, 2), Costs(1, 2))
    sheet = Sheet(HOSTILE, (HOSTILE,), [(HOSTILE,)])
    save_page(HOSTILE, HOSTILE, [sheet], {HOSTILE: timeline}, path)
    page = Page(path)
    assert page.tags.count("script") == 2
    assert sum("alert" in text for text in page.texts) == 6
    assert page.data["timelines"][0]["label"].startswith("</script><script>alert")


def test_the_command_prints_and_writes_its_report(tmp_path: Path) -> None:
    html, trace = tmp_path / "step.html", tmp_path / "step.trace.json"
    picture = tmp_path / "step.svg"
    arguments = ["profile", "--steps", "1", "--html", str(html), "--trace", str(trace)]
    arguments += ["--picture", str(picture)]
    result = CliRunner().invoke(app, [*arguments, "--schedule", "hanayo"])
    assert result.exit_code == 0, result.stderr
    assert "Why a step takes its time" in result.stdout
    assert "tokens/s" in result.stdout
    assert result.stdout.endswith(f"written: {html}\nwritten: {trace}\nwritten: {picture}\n")
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert "planned" in drawn
    assert "measured" in drawn
    assert len(Page(html).data["timelines"]) == 2
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "C"}
    counters = {event["name"] for event in events if event["ph"] == "C"}
    of = ("in flight", "activations as predicted")
    assert counters == {f"{what}, device {device}" for what in of for device in range(2)}
    held = [event["args"]["bytes"] for event in events if "bytes" in event.get("args", {})]
    assert max(held) > 2**10


@pytest.mark.parametrize("kind", ["html", "trace", "picture"])
def test_files_are_refused_before_anything_is_measured(tmp_path: Path, kind: str) -> None:
    """The profile was measured, and then lost, for a folder that is not there."""
    file = tmp_path / "none" / "x.svg"
    for command, of in (("profile", "no:model"), ("nsys", "no.sqlite"), ("trace", "no.json")):
        result = CliRunner().invoke(app, [command, f"--{kind}", str(file), of])
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"--{kind} must be a file in a folder that exists" in " ".join(result.stderr.split())


def test_one_file_for_two_forms_is_refused(tmp_path: Path) -> None:
    """The trace took the place of the page, and both were told as written."""
    one, same = tmp_path / "step", tmp_path / "other" / ".." / "step"
    (tmp_path / "other").mkdir()
    result = CliRunner().invoke(app, ["profile", "--html", str(one), "--trace", str(same)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--trace must be another file than --html" in result.stderr
    result = CliRunner().invoke(app, ["profile", "--picture", str(tmp_path / "step.jpeg")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must end in .png, .pdf or .svg" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "gpipe", "--waves", "2"], "--waves must go with hanayo, got gpipe"),
        (["--schedule", "frob"], "got 'frob'"),
        (["--steps", "0"], "must be a whole number of at least 1, got '0'"),
        (["--schedule", "pipedream"], "pykern.AsyncPipeline"),
    ],
)
def test_what_cannot_be_profiled_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["profile", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

"""Pages show the results that are kept, and no others."""

import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench import kept, report
from bench.harness import Record

ONE = Record("some_claim", "a case, 2 rows", "one", "one", 5, 2.0, 1.0, 3.0, 1.0, 1.0, "BASELINE")
OTHER = replace(ONE, contender="other", ratio=0.5, verdict="FASTER", figures={"rows/s": 7.0})


def test_the_pages_are_what_the_results_give(root: Path) -> None:
    for name, page in runpy.run_path(str(root / "docs/make_measured.py"))["made"]().items():
        assert page == (root / name).read_text(), "run python docs/make_measured.py"


# A commit or a date, which names the run of a figure.
RUN = re.compile(r"\bcommit [0-9a-f]{7}|\b20\d\d-\d\d-\d\d\b")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,.]*(?![\w-])")
MEASURED = re.compile(r"(?<![\w.-])\d[\d,.]* ?(?:%|(?:ms|µs|us|ns|s|times|GB/s|TFLOP/s)\b)")
# Not measured: a rule of the harness, and times that stages and steps are told to wait.
SET = (
    "SAME\nwithin 2 %",
    "10 ms in a forward and 20 ms",
    "waits 20 ms before",
    "spin 2 ms forward",
)


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and items, without what is made of results, headings, code and commands."""
    made = r"<!-- (\w+): made by docs/make_measured\.py -->.*?<!-- end of \1 -->"
    page = re.sub(made, "", page, flags=re.DOTALL)
    page = re.sub(r"^#+ .*$|^ {4,}\S.*$|`[^`\n]*`|\]\([^)]*\)", "", page, flags=re.MULTILINE)
    yield from (block for block in re.split(r"\n\s*\n|\n(?=- )", page) if block.strip())


def without_a_run(figure: re.Pattern[str], page: str) -> list[str]:
    """The paragraphs with a figure of an unnamed run."""
    for text in SET:
        page = page.replace(text, "")
    return [block for block in paragraphs(page) if figure.search(block) and not RUN.search(block)]


def test_findings_have_no_figure_of_an_unnamed_run(root: Path) -> None:
    """The tables change with the results, and sentences would keep what they said."""
    page = (root / "bench/README.md").read_text()
    findings = page.split("## What was found\n")[1].split("\nPlanning has a claim of its own")[0]
    assert len(re.findall(r"^- \*\*", findings, re.MULTILINE)) >= 12
    assert without_a_run(NUMBER, findings) == []


def test_sentences_beside_results_have_no_figure_of_an_unnamed_run(root: Path) -> None:
    on_one_h100 = (root / "docs/gpus.md").read_text().split("### On one H100\n")[1]
    pages = (root / "bench/README.md").read_text(), on_one_h100.split("\n## ")[0]
    assert all(any(text in page for page in pages) for text in SET)
    for page in pages:
        assert without_a_run(MEASURED, page) == []


@pytest.mark.parametrize("text", ["- It takes 0.88 times as long.", "A step: 1,024 ms\n(a GPT)."])
def test_a_figure_of_an_unnamed_run_is_found(text: str) -> None:
    assert without_a_run(MEASURED, text) == without_a_run(NUMBER, text) == [text]
    named = f"{text} At commit 03b6534."
    assert without_a_run(MEASURED, named) == without_a_run(NUMBER, f"{text} (2026-11-26)") == []
    assert (
        without_a_run(NUMBER, "1F1B and 2BW ([table](a-2.md)), `step(3)`\n\n    pytest -n 4") == []
    )


def write(folder: Path, date: str, *runs: list[Record]) -> None:
    texts = []
    for records in runs:
        (path,) = report.save(folder, {**report.environment("pytest"), "date": date}, records)
        texts.append(path.read_text())
        path.unlink()
    (folder / f"some_claim_{date}.jsonl").write_text("".join(texts))


def test_the_newest_file_of_a_claim_counts(tmp_path: Path) -> None:
    write(tmp_path, "2026-11-22", [replace(ONE, median_ms=5.0)])
    write(tmp_path, "2026-11-23", [ONE, OTHER])
    found = kept.newest("some_claim", tmp_path)
    assert found.cases == ["a case, 2 rows"]
    rows = found.of("a case")
    assert [*rows] == ["one", "other"]
    assert (rows["one"]["median_ms"], rows["other"]["rows/s"]) == (2.0, 7.0)
    assert "`pytest` at commit " in str(found)
    assert "2026-11-23" in str(found)


def test_of_two_machines_on_a_day_the_later_one_counts(tmp_path: Path) -> None:
    header = report.environment("pytest")
    for cpu, time, median_ms in (("a", "09:30", 1.0), ("b", "10:15", 2.0), ("c", "08:00", 3.0)):
        found = replace(ONE, median_ms=median_ms)
        report.save(tmp_path, {**header, "cpu": cpu, "time": time}, [found])
    assert kept.newest("some_claim", tmp_path).of("a case")["one"]["median_ms"] == 2.0


def test_several_runs_in_a_file_are_medians(tmp_path: Path) -> None:
    runs = [[replace(OTHER, ratio=ratio)] for ratio in (0.5, 0.9, 0.6)]
    write(tmp_path, "2026-11-23", *runs, [replace(OTHER, ratio=0.6, verdict="SAME")])
    found = kept.newest("some_claim", tmp_path)
    row = found.of("a case")["other"]
    assert row.all("ratio") == [0.5, 0.9, 0.6, 0.6]
    assert row["ratio"] == 0.6
    assert row.verdict == "AMBIGUOUS"
    assert str(found).startswith("medians of 4 runs of `pytest`")


def test_a_figure_that_no_run_has_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "2026-11-23", [ONE])
    with pytest.raises(KeyError):
        kept.newest("some_claim", tmp_path).of("a case")["one"]["rows/s"]


@pytest.mark.parametrize("git", ["", "#!/bin/sh\nexit 128\n"], ids=["no git", "no checkout"])
def test_a_tree_without_a_commit_is_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: str
) -> None:
    if git:
        command = tmp_path / "git"
        command.write_text(git)
        command.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.environment("pytest")["commit"] == "unknown"

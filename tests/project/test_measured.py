"""Pages show the results that are kept, and no others."""

import runpy
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

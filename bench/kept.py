"""The results in bench/results, for the pages that show them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .harness import Record

FOLDER = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Row:
    """A contender in a case: a record of each run."""

    records: tuple[Record, ...]

    def all(self, name: str) -> list[float]:
        """By run, a value of `Record` or one of its figures."""
        return [{**one.figures, **vars(one)}[name] for one in self.records]

    def __getitem__(self, name: str) -> float:
        """The median of a value over the runs."""
        return median(self.all(name))

    @property
    def verdict(self) -> str:
        """The verdict of all runs, or AMBIGUOUS where they differ."""
        verdicts = {one.verdict for one in self.records}
        return verdicts.pop() if len(verdicts) == 1 else "AMBIGUOUS"


@dataclass(frozen=True)
class Results:
    """The runs in the newest file of a claim.

    Attributes:
        headers: the environment of each run.
        rows: by case and contender, in the order of the file.
    """

    headers: tuple[Mapping[str, Any], ...]
    rows: Mapping[tuple[str, str], Row]

    @property
    def cases(self) -> list[str]:
        """All cases."""
        return list(dict.fromkeys(case for case, _ in self.rows))

    def of(self, start: str) -> dict[str, Row]:
        """The contenders of the one case with this beginning."""
        (case,) = (case for case in self.cases if case.startswith(start))
        return {contender: row for (of, contender), row in self.rows.items() if of == case}

    def __str__(self) -> str:
        """Where the results are from."""
        of = self.headers[-1]
        times = f"medians of {len(self.headers)} runs of " if len(self.headers) > 1 else ""
        return (
            f"{times}`{of['command']}` at commit {of['commit']}, {of['date']}, {of['cpu']}, "
            f"{of['cores']} cores, Python {of['python']}, torch {of['torch']}, load "
            f"{of['load_before']:.1f} before it"
        )


def newest(claim: str, folder: Path = FOLDER) -> Results:
    """The results of a claim that were measured last."""
    return max(map(_read, folder.glob(f"{claim}_*.jsonl")), key=_when)


def _when(results: Results) -> tuple[str, str]:
    """The date and the time of day; older results have no time."""
    header = results.headers[-1]
    return header["date"], header.get("time", "")


def _read(file: Path) -> Results:
    headers: list[Mapping[str, Any]] = []
    records: dict[tuple[str, str], list[Record]] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "claim" in line:
            record = Record(**line)
            records.setdefault((record.case, record.contender), []).append(record)
        else:
            headers.append(line)
    return Results(tuple(headers), {key: Row(tuple(of)) for key, of in records.items()})


def newest_lines(claim: str) -> list[dict[str, Any]]:
    """The results of a claim that is measured by a command of its own, a line for each."""
    found = [
        (file.stem.rpartition("_")[2], [json.loads(line) for line in text.splitlines()])
        for file in FOLDER.glob(f"{claim}_*.jsonl")
        for text in [file.read_text(encoding="utf-8")]
    ]
    _, lines = max(found, key=lambda of: (of[0], of[1][0].get("time", "")))
    return lines


def percent(ratio: float) -> str:
    """With a digit behind the point."""
    return f"{100 * ratio:.1f} %".replace("-", "−")  # noqa: RUF001 - a minus sign

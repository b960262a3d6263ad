"""The profile as one HTML page that needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..plan import Timeline
from ..plan.drawing.colours import colours_of
from ..plan.drawing.words import KIND_NAMES, clean, measures, row_names
from ..replacing import replacing
from .tables import Sheet


def save_page(
    title: str,
    summary: str,
    tables: Sequence[Sheet],
    timelines: Mapping[str, Timeline],
    path: str | os.PathLike[str],
) -> None:
    """Writes the page.

    Args:
        title: the name of the page.
        summary: a sentence about the step.
        tables: below the timelines.
        timelines: one above the other, by label; a label may be any string.
        path: the file; an existing file is replaced atomically.

    Raises:
        OSError: the file cannot be written.
    """
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "<!--summary-->": _escaped(summary),
        "<!--tables-->": "\n".join(map(_table, tables)),
        # Within a script, nothing but "</script" and "<!--" could end the data.
        "/*timelines*/": json.dumps(_data(timelines), separators=(",", ":")).replace(
            "<", "\\u003c"
        ),
    }
    page = page.replace("<!--title-->", _escaped(title))
    for place, content in parts.items():
        head, _, tail = page.partition(place)
        page = head + content + tail
    with replacing(Path(path)) as partial:
        partial.write_text(page, encoding="ascii")


def _table(table: Sheet) -> str:
    head = "".join(f"<th>{_escaped(column)}</th>" for column in table.columns)
    rows = [
        "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    ]
    return (
        f"<h2>{_escaped(table.title)}</h2>\n<table><tr>{head}</tr>\n" + "\n".join(rows) + "</table>"
    )


def _escaped(text: str) -> str:
    return (
        escape(text.encode("utf-8", "replace").decode("utf-8"))
        .encode("ascii", "xmlcharrefreplace")
        .decode("ascii")
    )


def _data(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The timelines, times in microseconds from their first start, and the colours of kinds."""
    kinds = {kind for timeline in timelines.values() for kind in timeline.kinds}
    return {
        "kinds": {
            kind.name: {"name": KIND_NAMES[kind], **colours_of(kind, 0, 1)._asdict()}
            for kind in sorted(kinds, key=lambda kind: kind.value)
        },
        "timelines": [
            {
                "label": clean(label),
                "measures": measures(timeline),
                "length": timeline.makespan_ns / 1e3,
                "rows": [
                    {"name": name, "spans": _spans(row, timeline.first_start_ns)}
                    for name, row in zip(row_names(timeline), timeline.rows, strict=True)
                ],
            }
            for label, timeline in timelines.items()
        ],
    }


def _spans(row: Sequence[Any], origin_ns: float) -> list[list[Any]]:
    """Start, length, kind, stage, microbatch and slice of each span."""
    return [
        [
            round((span.start_ns - origin_ns) / 1e3, 3),
            round((span.end_ns - span.start_ns) / 1e3, 3),
            span.action.kind.name,
            span.action.stage,
            span.action.microbatch,
            span.action.slice,
        ]
        for span in row
    ]

"""The output of commands that profile: tables, and the files that were asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import bad_input

if TYPE_CHECKING:
    from ..profiling import Report

HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", help="A page with timelines, which needs no network.", show_default="none"
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="A trace for ui.perfetto.dev.", show_default="none")
]


def show(report: Report, html: Path | None, trace: Path | None) -> None:
    """Prints the tables of a profile, and writes its files."""
    show_tables(report)
    for path, save in ((html, report.save_html), (trace, report.save_trace)):
        if path is not None:
            with bad_input():
                save(path)
            typer.echo(f"written: {path}")


def show_tables(report: object) -> None:
    """Prints tables: drawn on a terminal, else as plain lines."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(report)
    else:
        typer.echo(str(report))

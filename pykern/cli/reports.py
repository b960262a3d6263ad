"""The output of commands: tables, and the files that were asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .errors import bad_input

if TYPE_CHECKING:
    from ..profiling.drawn import WithTimelines

HtmlFile = Annotated[
    Path | None,
    typer.Option(
        "--html", help="A page with timelines, which needs no network.", show_default="none"
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="A trace for ui.perfetto.dev.", show_default="none")
]
PictureFile = Annotated[
    Path | None,
    typer.Option("--picture", help="Timelines as .svg, .png or .pdf.", show_default="none"),
]


def require_files(**files: Path | None) -> None:
    """Refuses files that cannot be written, before there is something to lose.

    Args:
        files: by option, without its dashes; a "picture" is one by its name, and "resume" is read
            where it is there.

    Raises:
        ValueError: a folder does not exist or may not be written to, two options name one file, or
            a picture has an unknown form.
    """
    from ..plan.drawing.picture import require_form
    from ..replacing import require_folder

    options: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        if not (option == "resume" and path.is_file()):
            require_folder(f"--{option}", path)
        if option == "picture":
            require_form(path)
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(
                f"--{option} must be another file than --{other}, got {path} for both. Name two "
                "files"
            )


def show(
    report: WithTimelines,
    html: Path | None,
    trace: Path | None,
    picture: Path | None,
    *more: tuple[Path | None, Callable[[Path], None]],
) -> None:
    """Prints the tables of a report with timelines, and writes its files."""
    print_and_save(
        partial(show_tables, report),
        *more,
        (html, report.save_html),
        (trace, report.save_trace),
        (picture, report.save_picture),
    )


def print_and_save(
    tables: Callable[[], None], *files: tuple[Path | None, Callable[[Path], None]]
) -> None:
    """Writes the files that were asked for, and prints tables: neither is lost with the other."""
    asked = [(path, save) for path, save in files if path is not None]
    try:
        with bad_input():
            for path, save in asked:
                save(path)
    finally:
        tables()
    for path, _ in asked:
        typer.echo(f"written: {path}")


def show_tables(report: object) -> None:
    """Prints tables: drawn on a terminal, else as plain lines."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(report)
    else:
        typer.echo(str(report))


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    below: Iterable[str],
    *,
    words: Collection[str],
    whole: Collection[str],
) -> None:
    """Prints a table of numbers.

    Args:
        headings: of its columns.
        rows: the texts under them.
        below: lines below the table.
        words: the columns that hold words, which begin at their left edge.
        whole: the columns that keep all their letters on a narrow terminal.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        side: Literal["left", "right"] = "left" if heading in words else "right"
        table.add_column(heading, justify=side, no_wrap=heading in whole)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    console.print(table)
    for line in below:
        console.print(Text(line))

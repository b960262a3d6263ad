"""`pykern doctor`: whether, and how fast, pipelines run on this machine."""

import typer

from .reports import show_tables


def doctor() -> None:
    """Print what decides whether, and how fast, pipelines run here; exit with 1 if they cannot.

    A terminal gets a table, a file or a pipe plain lines.
    """
    from ..doctor import examine

    report = examine()
    show_tables(report)
    if report.stops:
        raise typer.Exit(1)

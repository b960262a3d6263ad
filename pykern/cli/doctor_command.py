"""`pykern doctor`: whether, and how fast, pipelines run on this machine."""

import sys

import typer


def doctor() -> None:
    """Print what decides whether, and how fast, pipelines run here; exit with 1 if they cannot.

    A terminal gets a table, a file or a pipe plain lines.
    """
    from rich.console import Console

    from ..doctor import examine

    report = examine()
    if sys.stdout.isatty():
        Console(highlight=False).print(report)
    else:
        typer.echo(str(report))
    if report.stops:
        raise typer.Exit(1)

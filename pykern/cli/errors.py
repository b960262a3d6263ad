"""Errors in the user's input: one line on stderr and exit code 2, from whichever module."""

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from ..script import ScriptFailed


class BadInput(typer.TyperException):
    """The user's input cannot be used; the message says why."""

    exit_code = 2


class OneLineErrors(TyperGroup):
    """A group that shows every error as one line on stderr."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        _open_closed_streams()
        # A terminal or pipe that knows few characters shows "?" for the others.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            sys.exit(super().main(*args, **extra))
        except typer.TyperException as error:
            message = " ".join(error.format_message().split())
            typer.echo(f"pykern: {message}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.filename is not None:
                raise
            # The output cannot be written: Python would fail again on it when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            typer.echo(f"pykern: {error.strerror or error}", err=True)
            sys.exit(1)


def _open_closed_streams() -> None:
    """Opens the output that the caller has closed, for nobody, as Python has None in its place.

    The next file that is opened, such as a checkpoint, would get the number of the closed one, and
    what libraries print with it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


@contextmanager
def errors_of(script: str) -> Iterator[None]:
    """Prints the error that a script raises as Python does, and exits with 1."""
    try:
        yield
    except ScriptFailed as failed:
        _print_error(failed.__cause__, script)
        raise typer.Exit(1) from None


def _print_error(error: BaseException | None, script: str) -> None:
    """The traceback as Python prints it, from the script's own first line on."""
    assert error is not None
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename != script:
        start = start.tb_next
    traceback.print_exception(type(error), error, start)


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn errors of preparations into one line for the user."""
    try:
        with bad_files():
            yield
    except (ImportError, ValueError) as error:
        notes = getattr(error, "__notes__", ())
        raise BadInput("; ".join([str(error), *notes])) from error


@contextmanager
def bad_files() -> Iterator[None]:
    """Turn errors of files, as of a full disk, into one line for the user."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise  # of the output
        raise BadInput(f"{error.filename}: {error.strerror}") from error

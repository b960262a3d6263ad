"""Runs a user's script as Python would, to its end or until enough has been seen."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from .attributes import replaced


class ScriptFailed(Exception):
    """The script has raised an exception, which is the cause."""


class ScriptEnds(BaseException):
    """Ends the script: enough has been seen. Scripts that go on after errors do not catch it."""


def require_script(script: str) -> None:
    """Refuses a script that is not there, before there is something to lose.

    Raises:
        ValueError: there is no such file.
    """
    if not Path(script).is_file():
        raise ValueError(f"script must be a file, got {script}. Give the path of the script")


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs the script to its end, or until something in it raises `ScriptEnds`.

    Args:
        script: its file.
        arguments: its arguments.

    Raises:
        ValueError: there is no such file.
        SystemExit: the script ends with a status that is not 0.
        ScriptFailed: the script raises another exception.
    """
    require_script(script)
    with ExitStack() as undo:
        undo.enter_context(replaced(sys, "argv", [script, *arguments]))
        undo.enter_context(replaced(sys, "path", [str(Path(script).parent.absolute()), *sys.path]))
        try:
            runpy.run_path(script, run_name="__main__")
        except ScriptEnds:
            return
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
        except Exception as error:
            raise ScriptFailed from error

"""Writes commands.md, the reference of the command line, as typer makes it of the commands."""

import html
import re
from pathlib import Path

from typer import cli
from typer.testing import CliRunner

PAGE = Path(__file__).parent / "commands.md"
OPENING = """\
Every command and every option, as `pykern COMMAND --help` prints them. A command that takes
`MODULE:FUNCTION` calls a function of yours, which returns the model and a batch; without it, the
command takes a small GPT. Bad values are refused in one line, with exit status 2.
"""


def made() -> str:
    """The page as the commands of now make it."""
    command = ["pykern.cli", "utils", "docs", "--name", "pykern", "--title", "The command line"]
    page = html.unescape(CliRunner().invoke(cli.app, command).stdout)
    # The list of commands has them in cut sentences.
    page = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n", "", page)
    page = re.sub(r"^Example: (.*)$", r"Example: `\1`", page, flags=re.MULTILINE)
    return page.replace("Pipeline parallelism for PyTorch in one process.\n", OPENING, 1)


if __name__ == "__main__":
    PAGE.write_text(made())

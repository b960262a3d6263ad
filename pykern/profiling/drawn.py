"""Tables in words, drawn for a terminal or as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .tables import Sheet

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

# Columns of the plain form.
WIDTH = 120
# The columns that hold words.
_TEXTS = frozenset(
    [
        *("part", "remedy", "change", "basis", "GPU", "fits", "copies go", "violations"),
        *("line", "inside of", "call", "action", "reason", "note"),
    ]
)


def in_group(summary: str, sheets: Sequence[Sheet]) -> Group:
    """A summary and tables, for a terminal."""
    from rich.console import Group  # noqa: PLC0415 - takes long
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Text | Table] = [Text(summary + "\n")]
    for sheet in sheets:
        drawn = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
        )
        for column in sheet.columns:
            drawn.add_column(column, justify="left" if column in _TEXTS else "right")
        for row in sheet.rows:
            drawn.add_row(*map(Text, row))
        parts += [Text(sheet.title, style="bold"), drawn, Text("")]
    return Group(*parts)


def in_text(drawn: RenderableType) -> str:
    """The plain form, for logs and pipes."""
    from rich.console import Console  # noqa: PLC0415 - takes long

    out = io.StringIO()
    Console(file=out, width=WIDTH, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

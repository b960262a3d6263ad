"""Reports of a summary and tables, drawn for a terminal or as plain text."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .tables import Sheet

if TYPE_CHECKING:
    from rich.console import Group

# Columns of the plain form.
WIDTH = 120
# The columns that hold words.
_TEXTS = frozenset(
    [
        *("part", "remedy", "change", "basis", "GPU", "fits", "copies go", "violations"),
        *("line", "inside of", "call", "action", "reason", "note"),
    ]
)


class InTables(ABC):
    """A report whose string has all of its tables."""

    @abstractmethod
    def summary(self) -> str:
        """The text above the tables."""

    @abstractmethod
    def tables(self) -> Sequence[Sheet]:
        """All tables, in their order."""

    def __rich__(self) -> Group:
        """The form for a terminal."""
        from rich.console import Group  # noqa: PLC0415 - takes long
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        parts: list[Text | Table] = [Text(self.summary() + "\n")]
        for sheet in self.tables():
            drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for column in sheet.columns:
                drawn.add_column(column, justify="left" if column in _TEXTS else "right")
            for row in sheet.rows:
                drawn.add_row(*map(Text, row))
            parts += [Text(sheet.title, style="bold"), drawn, Text("")]
        return Group(*parts)

    def __str__(self) -> str:
        """The plain form, for logs and pipes."""
        from rich.console import Console  # noqa: PLC0415 - takes long

        out = io.StringIO()
        Console(file=out, width=WIDTH, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

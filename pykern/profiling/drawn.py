"""Reports of a summary, tables and timelines, drawn for a terminal or as plain text."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..plan import Action, Timeline
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


class WithTimelines(ABC):
    """A report whose string has all of its tables, and whose timelines can be drawn.

    Attributes:
        command: the command that prints it, which is the title of its page.
    """

    command: ClassVar[str]

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
        # In a notebook Rich would show the text itself and write nothing, and FORCE_COLOR adds
        # codes of a terminal.
        plain = Console(
            file=out, width=WIDTH, highlight=False, force_jupyter=False, force_terminal=False
        )
        plain.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    @abstractmethod
    def timelines(self) -> Mapping[str, Timeline]:
        """The timelines by label, to be drawn one above the other."""

    def held_by_action(self) -> Mapping[Action, float]:
        """By action, how many bytes of activations more its device holds; empty if not known."""
        return {}

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one page that needs no network: tables, and timelines to zoom into.

        Raises:
            OSError: the file cannot be written.
        """
        from .page import save_page  # noqa: PLC0415 - drawings import rich

        save_page(self.command, self.summary(), self.tables(), self.timelines(), path)

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the timelines one above the other.

        Args:
            path: the file, `.svg`, or with the extra `viz` `.png` or `.pdf`.

        Raises:
            ValueError: there is no timeline, or the file is of another kind.
            ImportError: the file is not an SVG, and matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from ..plan.drawing import save_picture  # noqa: PLC0415 - it imports rich

        save_picture(self.timelines(), path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace for ui.perfetto.dev, with arrows between stages.

        Counters have each device's microbatches in flight, and where they are known the activations
        that it would hold.

        Raises:
            ValueError: there is no timeline.
            OSError: the file cannot be written.
        """
        from ..plan.drawing import save_chrome_trace  # noqa: PLC0415 - it imports rich

        save_chrome_trace(self.timelines(), path, self.held_by_action())

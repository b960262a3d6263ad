"""Facts about a machine, with their problems, as a table and as plain lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Fact:
    """Something that decides whether, or how fast, a pipeline runs.

    Attributes:
        name: its name.
        value: its value here.
        problem: the problem and its fix, in one sentence; empty if all is well.
        stops: whether the problem stops a pipeline; others slow pipelines.
    """

    name: str
    value: str
    problem: str = ""
    stops: bool = False

    @property
    def verdict(self) -> str:
        """The word "ok", "slows" or "stops"."""
        if not self.problem:
            return "ok"
        return "stops" if self.stops else "slows"


@dataclass(frozen=True)
class Diagnosis:
    """All facts about a machine; its string has a line for each fact and each problem."""

    facts: Sequence[Fact]

    @property
    def stops(self) -> bool:
        """Whether any problem stops a pipeline."""
        return any(fact.stops for fact in self.facts)

    def __str__(self) -> str:
        """The plain form, for logs and pipes."""
        lines = []
        for fact in self.facts:
            lines.append(f"{fact.name}: {fact.value}")
            if fact.problem:
                lines.append(f"  {fact.verdict}: {fact.problem}")
        return "\n".join(lines)

    def __rich__(self) -> Table:
        """The table, for terminals."""
        from rich.table import Table  # noqa: PLC0415 - takes long
        from rich.text import Text  # noqa: PLC0415 - takes long

        colours = {"ok": "green", "slows": "yellow", "stops": "bold red"}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("fact", "value", ""):
            table.add_column(heading)
        for fact in self.facts:
            verdict = Text(fact.verdict, style=colours[fact.verdict])
            value = Text(fact.value)
            if fact.problem:
                value.append(f"\n{fact.problem}", style=colours[fact.verdict])
            table.add_row(fact.name, value, verdict)
        return table

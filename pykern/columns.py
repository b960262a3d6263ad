"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def in_columns(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Rows as lines, whose cells end below each other; those of column `left` begin so."""
    columns = [[*column] for column in zip(*rows, strict=True)]
    for number, column in enumerate(columns):
        put = str.ljust if number == left else str.rjust
        column[:] = [put(cell, max(map(len, column))) for cell in column]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))

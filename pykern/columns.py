"""Tables and counts as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """The number with its noun, as in "1 step", "1,000 steps" and "2 microbatches"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def in_columns(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Rows as lines, whose cells end below each other; those of column `left` begin so."""
    columns = [[*column] for column in zip(*rows, strict=True)]
    for number, column in enumerate(columns):
        put = str.ljust if number == left else str.rjust
        column[:] = [put(cell, max(map(len, column))) for cell in column]
    return "\n".join(map("  ".join, zip(*columns, strict=True)))


def by_device(names: Sequence[str], devices: Sequence[object]) -> str:
    """A row for each device with its attributes that are bytes, all in the unit of the largest."""
    held = [[getattr(device, name) for name in names] for device in devices]
    most = max(of for row in held for of in row if of is not None)
    units = {"GiB": 2**30, "MiB": 2**20}
    unit, size = next((of for of in units.items() if most >= of[1]), ("KiB", 2**10))
    told = [["unknown" if of is None else f"{of / size:.3f}" for of in row] for row in held]
    rows = [[str(number), *row] for number, row in enumerate(told)]
    return in_columns([[f"{unit} of device", *names], *rows])

"""The table of docs/memory.md, made of the newest results of bench.estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median, quantiles

from .kept import newest_lines, percent

_MUCH = 0.02


def accuracy() -> str:
    """Estimated bytes of activations beside those that devices held."""
    lines = newest_lines("estimates")
    errors = [
        (estimated - held) / held
        for line in lines
        if "refused" not in line
        for estimated, held in zip(line["estimated"], line["measured"], strict=True)
    ]
    sizes = [abs(error) for error in errors]
    refused = sum("refused" in line for line in lines)
    cells = (
        len(lines) - refused,
        len(errors),
        percent(median(sizes)),
        percent(quantiles(sizes, n=10)[-1]),
        sum(error < -_MUCH for error in errors),
        refused,
    )
    return (
        "| models | devices | error, median | at the 90th percentile | too low by more than "
        f"{100 * _MUCH:.0f} % | models refused |\n|--:|--:|--:|--:|--:|--:|\n"
        f"| {' | '.join(map(str, cells))} |"
    )


TABLES: Mapping[str, Callable[[], str]] = {"accuracy": accuracy}

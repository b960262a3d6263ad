"""The tables of docs/tuning.md, made of the newest results of bench.predicted and bench.tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from .kept import newest_lines, percent

_MODELS = {"gpt": "GPT", "llama": "Llama", "unet": "U-Net", "bert": "BERT", "mlp": "uneven MLP"}


def predictions() -> str:
    """Predicted steps beside measured ones, by the number of devices."""
    rows = newest_lines("predicted")
    lines = ["| devices | configurations | difference, median | at worst |", "|--:|--:|--:|--:|"]
    for devices in sorted({row["devices"] for row in rows}):
        errors = [row["error"] for row in rows if row["devices"] == devices]
        cells = (devices, len(errors), percent(median(errors)), percent(max(errors)))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def choices() -> str:
    """Choices of `tune` beside the best of all plans, by model."""
    lines = [
        "| model | choice | ms | above the best | times as fast as the default `Pipeline` | plans "
        "| time of `tune` / of all plans |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in newest_lines("tuning"):
        many = row["microbatches"]
        cells = (
            _MODELS[row["model"]],
            f"`{row['schedule']}`, {many} microbatch{'es' if many > 1 else ''}",
            f"{row['chosen_ms']:.1f}",
            percent(row["above_best"]),
            f"{row['speedup_over_default']:.2f}",
            str(row["plans"]),
            f"{row['share_of_time']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {"predictions": predictions, "choices": choices}

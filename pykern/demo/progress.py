"""The demo's progress: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

NUM_LINES = 10


def progress(console: Console, losses: Iterable[float], steps: int) -> Iterator[float]:
    """Pass the loss of each step on, and show how far training is.

    Args:
        console: Where to show it.
        losses: One loss per step, in nats.
        steps: How many there will be.
    """
    return _bar(console, losses, steps) if console.is_terminal else _lines(console, losses, steps)


def _bar(console: Console, losses: Iterable[float], steps: int) -> Iterator[float]:
    columns = (
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, loss="-")
        for loss in losses:
            bar.update(task, advance=1, loss=f"{loss:.3f}")
            yield loss


def _lines(console: Console, losses: Iterable[float], steps: int) -> Iterator[float]:
    start = time.perf_counter()
    every = max(1, steps // NUM_LINES)
    for step, loss in enumerate(losses, start=1):
        if step == 1 or step % every == 0 or step == steps:
            elapsed = time.perf_counter() - start
            console.print(
                f"step {step:>{len(str(steps))}}/{steps}  loss {loss:.3f}  {elapsed:.1f} s"
            )
        yield loss

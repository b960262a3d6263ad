"""The progress of a part of tuning: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A function that is called with the share that is done, 0 to 1.
Tell = Callable[[float], object]


@contextmanager
def told(what: str) -> Iterator[Tell]:
    """Gives a function to call with the share that is done.

    Args:
        what: names the part.
    """
    from rich.console import Console  # noqa: PLC0415 - only where something is shown
    from rich.progress import Progress  # noqa: PLC0415

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)

"""The demo's report: its settings, its results, and the files that it writes."""

from __future__ import annotations

import math
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from rich.text import Text

from ..cgroup import usable_cores
from ..columns import counted
from ..plan.drawing import as_text, save_chrome_trace, save_picture
from .sample import printable

if TYPE_CHECKING:
    from rich.console import Console

    from ..pipeline.pipeline import Pipeline
    from ..plan import Timeline
    from .text import Corpus

PICTURE = "timeline.png"
TRACE = "trace.json"


def opening(
    console: Console, pipe: Pipeline, corpus: Corpus, steps: int, bytes_per_step: int
) -> None:
    """Print the model, its cut into stages, and the training data."""
    parameters = sum(parameter.numel() for parameter in pipe.parameters())
    plan = pipe.plan
    console.print(
        f"A byte-level GPT of {parameters:,} parameters, cut into "
        f"{counted(plan.num_stages, 'stage')} on {counted(plan.num_devices, 'device')}:\n"
    )
    console.print(Text(indent(str(pipe.partition), "  ")))
    source = f"{corpus.source} ({len(corpus.training):,} bytes)"
    console.print(
        Text(
            f"\nTraining on {source}:\n"
            f"{counted(steps, 'step')} of {bytes_per_step:,} bytes in "
            f"{counted(plan.num_microbatches, 'microbatch')}.\n"
        )
    )


def result(console: Console, before: float, after: float, text: bytes) -> None:
    """Print how well the model predicts held-out text, and a text that the model writes."""
    bits_before, bits_after = before / math.log(2), after / math.log(2)
    console.print(
        f"\nHeld-out loss in nats per byte: {before:.3f} before training, {after:.3f} after.\n"
        f"In bits per byte: {bits_before:.2f} before, {bits_after:.2f} after.\n\n"
        "The model writes:\n"
    )
    console.print(Text(indent(printable(text), "  ")))


def timelines(
    console: Console, measured: Timeline, predicted: Timeline, out: Path, *, by_workers: bool
) -> None:
    """Print the last step and its prediction, and write both as a picture and as a trace."""
    both = {"measured (last step)": measured, "predicted": predicted}
    console.print("\nThe timelines:\n")
    console.print(as_text(both, console.width))
    num_cores = usable_cores()
    if by_workers and measured.num_devices > num_cores:
        console.print(
            f"\n{measured.num_devices} workers share {counted(num_cores, 'core')} here; "
            "the prediction has one core for each."
        )
    console.print("\nWritten:")
    try:
        save_picture(both, out / PICTURE)
        console.print(Text(f"  {out / PICTURE}: the same as a picture"), soft_wrap=True)
    except ImportError as error:
        console.print(Text(f"  no {PICTURE}: {error}"), soft_wrap=True)
    save_chrome_trace(both, out / TRACE)
    console.print(Text(f"  {out / TRACE}: the same for ui.perfetto.dev"), soft_wrap=True)


def closing(console: Console) -> None:
    """Print the next commands to try."""
    console.print(
        "\nNext:\n"
        "  pykern demo --waves 2                twice as many stages, a smaller bubble\n"
        "  pykern demo --data FILE              train on a text of your own\n"
        "  pykern plan one_f_one_b -p 4 -m 8    draw another schedule"
    )

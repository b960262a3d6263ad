"""The demo from start to finish: build, train, compare, sample, draw.

This module decides sizes and order; each part is in a file of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..models import gpt, next_token_loss
from ..modes import torch_threads
from ..pipeline.pipeline import Pipeline
from . import report
from .progress import progress
from .sample import generate
from .text import Corpus, batches, even_windows
from .train import held_out_loss, train

if TYPE_CHECKING:
    from rich.console import Console

    from ..plan import Plan

SEED = 0


@dataclass(frozen=True)
class DemoSettings:
    """The sizes of the demo; a run with the defaults takes about a minute on two cores.

    Attributes:
        steps: Optimizer steps.
        blocks: Fewest transformer blocks; a plan with many stages gets more, half a block a stage.
        width: Width of the model.
        heads: Attention heads.
        context: Bytes that the model sees at once.
        batch: Fewest rows per step; a plan with more microbatches gets one row for each.
        learning_rate: The highest learning rate of the run.
        held_out_windows: Number of held-out windows for the loss.
        sample_bytes: Bytes to generate.
    """

    steps: int = 400
    blocks: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 16
    learning_rate: float = 4e-3
    held_out_windows: int = 32
    sample_bytes: int = 300

    @property
    def window(self) -> int:
        """Bytes of one example: the context, and the byte after it."""
        return self.context + 1


def run(
    plan: Plan,
    devices: str,
    corpus: Corpus,
    out: Path,
    console: Console,
    settings: DemoSettings,
) -> None:
    """Train a small GPT on `corpus` by `plan`, and show what happened.

    Args:
        plan: The schedule; its number of microbatches and stages is the demo's.
        devices: The devices that the plan runs on, as for `Pipeline`.
        corpus: The text.
        out: An existing folder for the demo's files.
        console: The console for the report.
        settings: The sizes of the demo.
    """
    model = gpt(
        layers=max(settings.blocks, -(-plan.num_stages // 2)),
        width=settings.width,
        heads=settings.heads,
        context=settings.context,
        seed=SEED,
    )
    batch = max(settings.batch, plan.num_microbatches)
    data = batches(corpus.training, batch, settings.window, SEED)
    held_out = even_windows(corpus.held_out, settings.held_out_windows, settings.window)
    pipe = Pipeline(model, devices=devices, schedule=plan, loss_fn=next_token_loss)
    with torch_threads(1), pipe:
        report.opening(console, pipe, corpus, settings.steps, batch * settings.context)
        before = held_out_loss(pipe, *held_out)
        losses = train(pipe, data, settings.steps, settings.learning_rate)
        for _ in progress(console, losses, settings.steps):
            pass
        measured, predicted = pipe.timeline(), pipe.prediction()
        after = held_out_loss(pipe, *held_out)
        text = generate(pipe, b"def ", settings.sample_bytes, settings.context, 0.6, SEED)
    report.result(console, before, after, text)
    report.timelines(console, measured, predicted, out, by_workers=devices.startswith("cpu"))
    report.closing(console)

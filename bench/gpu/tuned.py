"""The choice of `pykern.tune` for a GPT on this GPU: predicted and measured times and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import pykern
from pykern.models import next_token_loss
from pykern.tuning.choice import Choice
from pykern.tuning.proposal import Proposal

from .frame import Json
from .gpt_work import GptWork
from .variants import tried


def run(folder: Path) -> Json:
    torch.set_float32_matmul_precision("high")
    work, rows = GptWork(blocks=8, width=1024, context=512), 32
    chosen = tuned(work, rows)
    (folder / "tuned.txt").write_text(f"{chosen}\n")
    # So that microbatches are recomputed.
    tight = bytes_of(chosen.best) / 2
    return {
        "all memory": measure(chosen, work, rows),
        "half of it": tried(lambda: measure(tuned(work, rows, memory=tight), work, rows)),
    }


def control() -> bool:
    """A model with four times the blocks of the one that was tuned."""
    small, large = (GptWork(blocks, width=256, context=64) for blocks in (2, 8))
    found, predicted = peak_bytes(tuned(large, 8), large, 8), bytes_of(tuned(small, 8).best)
    return found > 1.5 * predicted


def tuned(work: GptWork, rows: int, **more: Any) -> Choice:
    inputs, target = work.batch(rows)
    return pykern.tune(
        work.model(),
        sample=inputs,
        target=target,
        loss_fn=next_token_loss,
        devices="cuda:0",
        optimizer=torch.optim.AdamW,
        **more,
    )


def bytes_of(one: Proposal) -> float:
    return max(one.peak_bytes)


def measure(chosen: Choice, work: GptWork, rows: int) -> Json:
    """The proposals that were run, and the peak memory of steps of the best."""
    return {
        "simulated": chosen.num_simulated,
        "run": [
            {
                "schedule": one.schedule,
                "microbatches": one.microbatches,
                "predicted_ms": one.predicted_ns / 1e6,
                "measured_ms": one.measured_ns / 1e6,
                "predicted_bytes": bytes_of(one),
            }
            for one in chosen.proposals
            if one.measured_ns is not None
        ],
        "peak_bytes": peak_bytes(chosen, work, rows),
    }


def peak_bytes(chosen: Choice, work: GptWork, rows: int) -> int:
    """The most that torch allocates in steps of the best, with AdamW."""
    inputs, target = work.batch(rows)
    before = torch.cuda.memory_allocated()
    with chosen.pipeline() as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for number in range(3):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            pipe.step(inputs, target=target)
            optimizer.step()
            pipe.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

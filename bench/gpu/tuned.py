"""The choice of `pykern.tune` for a GPT on this GPU: predicted and measured times and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pykern
from pykern.models import gpt, next_token_loss
from pykern.tuning.choice import Choice
from pykern.tuning.proposal import Proposal

from .frame import Json
from .tools import DEVICE
from .variants import tried


@dataclass(frozen=True)
class Work:
    """A GPT, and the shape of a batch of it."""

    blocks: int
    width: int
    rows: int
    context: int


def run(folder: Path) -> Json:
    torch.set_float32_matmul_precision("high")
    work = Work(blocks=8, width=1024, rows=32, context=512)
    chosen = tuned(work)
    (folder / "tuned.txt").write_text(f"{chosen}\n")
    # So that microbatches are recomputed.
    tight = bytes_of(chosen.best) / 2
    return {
        "all memory": measure(chosen, work),
        "half of it": tried(lambda: measure(tuned(work, memory=tight), work)),
    }


def control() -> bool:
    """A model with four times the blocks of the one that was tuned."""
    small, large = (Work(blocks, width=256, rows=8, context=64) for blocks in (2, 8))
    return peak_bytes(tuned(large), large) > 1.5 * bytes_of(tuned(small).best)


def tuned(work: Work, **more: Any) -> Choice:
    ids = batch(work)
    return pykern.tune(
        gpt(layers=work.blocks, width=work.width, heads=work.width // 64, context=work.context),
        sample=ids[:, :-1],
        target=ids[:, 1:],
        loss_fn=next_token_loss,
        devices="cuda:0",
        optimizer=torch.optim.AdamW,
        **more,
    )


def batch(work: Work) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (work.rows, work.context + 1), generator=generator).to(DEVICE)


def bytes_of(one: Proposal) -> float:
    return max(one.peak_bytes)


def measure(chosen: Choice, work: Work) -> Json:
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
        "peak_bytes": peak_bytes(chosen, work),
    }


def peak_bytes(chosen: Choice, work: Work) -> int:
    """The most that torch allocates in steps of the best, with AdamW."""
    ids = batch(work)
    before = torch.cuda.memory_allocated()
    with chosen.pipeline() as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for number in range(3):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            pipe.step(ids[:, :-1], target=ids[:, 1:])
            optimizer.step()
            pipe.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

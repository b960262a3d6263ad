"""Step time and peak memory of a Llama-8B-style stage at each recompute level."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.runtime.recompute.recompute import LEVELS, Level

from .frame import Json
from .tools import DEVICE

BLOCKS, WIDTH, HEADS, TOKENS, MICROBATCHES = 4, 4096, 32, 8192, 4
ROUNDS = 5


def run(folder: Path) -> Json:
    chain = blocks(BLOCKS, WIDTH, HEADS).to(DEVICE, torch.bfloat16)
    x = torch.randn(MICROBATCHES, TOKENS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    return {level: measure(chain, x, level) for level in LEVELS}


def control() -> bool:
    """A stage that keeps all, where one that keeps its inputs is expected."""
    chain = blocks(2, 64, 4).to(DEVICE, torch.bfloat16)
    x = torch.randn(2, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    kept, recomputed = (measure(chain, x, of)["activation_bytes"] for of in ("none", "stage"))
    return bool(kept > recomputed)


def blocks(count: int, width: int, heads: int) -> nn.Sequential:
    """The blocks of a Llama in the proportions of its 8B model, without embedding and head."""
    from pykern.models import llama  # noqa: PLC0415 - a section is described without models

    kv_heads = max(heads // 4, 1)
    model = llama(16, count, width, heads, kv_heads, width * 7 // 2, 500000.0)
    return nn.Sequential(*list(model)[1:-1])


def loss(output: Tensor) -> Tensor:
    return F.mse_loss(output.float(), torch.zeros((), device=output.device).expand_as(output))


def measure(chain: nn.Sequential, x: Tensor, level: Level) -> Json:
    """All microbatches forward, then all backward: each of them is alive at once."""
    layers = copy.deepcopy(chain)
    plan = schedules.gpipe(1, len(x))
    with pykern.Pipeline(
        layers, devices=[str(x.device)], schedule=plan, loss_fn=loss, recompute=level
    ) as pipe:
        for _ in range(3):
            pipe.step(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [step_ms(pipe, x) for _ in range(ROUNDS)]
        return {
            "step_ms": min(times),
            "activation_bytes": torch.cuda.max_memory_allocated() - before,
            "estimated_bytes": estimated_bytes(chain, x, level),
            "predicted_ms": predicted_ms(pipe, x),
        }


def estimated_bytes(chain: nn.Sequential, x: Tensor, level: Level) -> float:
    """The activations by `pykern.estimate`, without the GPU."""
    (device,) = pykern.estimate(
        chain,
        devices=1,
        sample=x[:1],
        loss_fn=loss,
        schedule="gpipe",
        microbatches=len(x),
        recompute=level,
    ).devices
    return device.activations


def step_ms(pipe: pykern.Pipeline, x: Tensor) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    pipe.step(x)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def predicted_ms(pipe: pykern.Pipeline, x: Tensor) -> float:
    with pipe.tracing():
        pipe.step(x)
    return pipe.prediction().makespan_ns / 1e6

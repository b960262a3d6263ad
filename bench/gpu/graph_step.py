"""A replayed step of four stages on one GPU, against the unpipelined model's own graphed step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bench.contenders import Task, plain
from bench.harness import Contender
from pykern.models import gpt, next_token_loss
from pykern.schedules import one_f_one_b

from .frame import Json
from .side_by_side import Make, clear, gradients, notices_wrong_gradients, of_each_way, side_by_side
from .tools import DEVICE, captured, own_stream, warm

NUM_MICROBATCHES = 8


def run(folder: Path) -> Json:
    torch.set_float32_matmul_precision("high")
    return measure(task(DEVICE, width=1024, context=512), rounds=20)


def control() -> bool:
    """A contender with twice the gradients."""
    return notices_wrong_gradients(DEVICE)


def measure(work: Task, rounds: int) -> Json:
    plan = one_f_one_b(4, work.num_microbatches)
    makers: dict[str, Make] = {
        "graphed": partial(graphed, work),
        "plain loop": partial(plain, work),
        **of_each_way(work, plan),
    }
    return side_by_side("graph_step", makers, rounds, tolerance=1e-2)


def task(device: torch.device, width: int, context: int) -> Task:
    """A GPT of eight blocks, two rows a microbatch."""
    model = gpt(layers=8, width=width, heads=width // 64 or 1, context=context)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (2 * NUM_MICROBATCHES, context + 1), generator=generator).to(device)
    return Task(model, ids[:, :-1].clone(), ids[:, 1:].clone(), NUM_MICROBATCHES, next_token_loss)


def graphed(work: Task) -> Contender:
    """All microbatches in one graph, which like pykern's reads a copy of the batch."""
    model, stream = work.fresh(), own_stream()
    inputs, target = work.inputs.clone(), work.target.clone()
    parts = list(zip(inputs.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def issue() -> torch.Tensor:
        total = torch.zeros((), device=inputs.device)
        for x, y in parts:
            loss = work.loss_fn(model(x), y) / NUM_MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    torch.autograd.set_multithreading_enabled(False)
    warm(issue, stream)
    graph, total = captured(issue, stream)

    def step() -> float:
        inputs.copy_(work.inputs)
        target.copy_(work.target)
        graph.replay()
        return float(total.item())

    return Contender("graphed", step, lambda: gradients(model), lambda: clear(model))

"""Step times of what runs a pipeline in one process: pykern, torch's runtime, older pipelines."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bench.contenders import Task, fairscale, plain, process_group, torch_runtime, torchgpipe
from pykern.schedules import one_f_one_b

from . import graph_step
from .frame import Json
from .side_by_side import Make, notices_wrong_gradients, of_each_way, side_by_side
from .tools import DEVICE

NUM_STAGES = 4


def run(folder: Path) -> Json:
    torch.set_float32_matmul_precision("high")
    tasks = {"tiny": tiny(DEVICE), "gpt": graph_step.task(DEVICE, width=1024, context=512)}
    return {name: measure(name, task, rounds=15) for name, task in tasks.items()}


def control() -> bool:
    """A contender with twice the gradients."""
    return notices_wrong_gradients(DEVICE)


def measure(name: str, task: Task, rounds: int) -> Json:
    plan = one_f_one_b(NUM_STAGES, task.num_microbatches)
    makers: dict[str, Make] = {
        "plain loop": partial(plain, task),
        **of_each_way(task, plan),
        "torch runtime": partial(torch_runtime, task, NUM_STAGES),
        "torchgpipe": partial(torchgpipe, task, NUM_STAGES),
        "fairscale": partial(fairscale, task, NUM_STAGES),
    }
    with process_group():
        return side_by_side(name, makers, rounds, tolerance=1e-2)


def tiny(device: torch.device) -> Task:
    """Stages of so little work that issuing it is what takes time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(NUM_STAGES)))
    x, y = torch.randn(2, 4 * 32, 16).to(device)
    return Task(model, x, y, 32, F.mse_loss)

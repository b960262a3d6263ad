"""Graph pools: one for all slots corrupts activations, one per slot does not; what each costs."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .frame import Json
from .tools import DEVICE, captured, launch, own_stream, warm

NUM_SLOTS = 4


def run(folder: Path) -> Json:
    torch.autograd.set_multithreading_enabled(False)
    shared = torch.cuda.graph_pool_handle()
    return {
        "shared": slots([shared] * NUM_SLOTS),
        "per_slot": slots([torch.cuda.graph_pool_handle() for _ in range(NUM_SLOTS)]),
    }


def control() -> bool:
    """One pool for all slots."""
    return not all(slots([torch.cuda.graph_pool_handle()] * NUM_SLOTS)["right"])


def slots(pools: list[Any]) -> Json:
    """All F, then all B: every slot's activations must live through the F of the others."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    stage = nn.Sequential(*layers).to(DEVICE)
    stream = own_stream()
    inputs = [torch.randn(256, 1024, device=DEVICE, requires_grad=True) for _ in pools]
    expected = [gradient(stage, x).clone() for x in inputs]
    warm(lambda: gradient(stage, inputs[0]), stream)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    start = time.perf_counter()
    graphs = [capture_slot(stage, x, stream, pool) for x, pool in zip(inputs, pools, strict=True)]
    took_ms = (time.perf_counter() - start) * 1e3
    for forward, _, _ in graphs:
        launch(forward, stream)
    right = []
    for (_, backward, result), wanted in zip(graphs, expected, strict=True):
        launch(backward, stream)
        torch.cuda.synchronize()
        right.append(torch.equal(result, wanted))
    return {
        "right": right,
        "bytes_per_slot": (torch.cuda.memory_reserved() - before) // NUM_SLOTS,
        "capture_ms_per_graph": took_ms / (2 * NUM_SLOTS),
    }


def gradient(stage: nn.Module, x: Tensor) -> Tensor:
    output = stage(x)
    return torch.autograd.grad(output, x, torch.ones_like(output))[0]


def capture_slot(
    stage: nn.Module, x: Tensor, stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph, Tensor]:
    """F and B of a slot. After B the allocator counts the activations as free."""
    upstream = torch.ones(256, 1024, device=DEVICE)
    forward, output = captured(lambda: stage(x), stream, pool)
    backward, (result,) = captured(lambda: torch.autograd.grad(output, x, upstream), stream, pool)
    return forward, backward, result

"""Raw graph launches in torch's profiler: names and counts of its events."""

from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .frame import Json
from .tools import DEVICE, captured, launch, own_stream, warm

NUM_LAUNCHES = 8


def run(folder: Path) -> Json:
    stream = own_stream()
    x = torch.randn(512, 512, device=DEVICE)

    def work() -> torch.Tensor:
        return (x @ x).relu()

    warm(work, stream)
    graph, _ = captured(work, stream)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(NUM_LAUNCHES):
            launch(graph, stream)
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(folder / "profiler.trace.json"))
    # The names as they come, so that a reader sees whether a launch is one block or its kernels.
    return {
        "launches": NUM_LAUNCHES,
        "events": dict(Counter(str(event.name) for event in profiled.events())),
    }

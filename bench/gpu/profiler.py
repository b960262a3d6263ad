"""Raw graph launches in torch's profiler: names and counts of its events."""

import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .frame import Json
from .tools import DEVICE, captured, launch, own_stream, warm

NUM_LAUNCHES = 8


def run(folder: Path) -> Json:
    return events(NUM_LAUNCHES, folder / "profiler.trace.json")


def control() -> bool:
    """No launch at all."""
    with tempfile.TemporaryDirectory() as scratch:
        some, none = (events(n, Path(scratch) / f"{n}.json")["events"] for n in (1, 0))
    return bool(some.keys() - none.keys())


def events(num_launches: int, trace: Path) -> Json:
    stream = own_stream()
    x = torch.randn(512, 512, device=DEVICE)

    def work() -> torch.Tensor:
        return (x @ x).relu()

    warm(work, stream)
    graph, _ = captured(work, stream)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(num_launches):
            launch(graph, stream)
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    # The names as they come, so that a reader sees whether a launch is one block or its kernels.
    return {
        "launches": num_launches,
        "events": dict(Counter(str(event.name) for event in profiled.events())),
    }

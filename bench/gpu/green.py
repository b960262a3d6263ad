"""Groups of multiprocessors: which ones kernels see, eager and in a graph launched elsewhere."""

import importlib
from pathlib import Path
from typing import Any

import torch

from .frame import Json
from .groups import Group, split
from .tools import DEVICE, captured, checked, driver, launch, own_stream

NUM_BLOCKS = 4096
# Each block spins a little, so that the blocks spread over all the multiprocessors there are.
SOURCE = r"""
extern "C" __global__ void where(int* seen) {
    unsigned id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    const long long start = clock64();
    while (clock64() - start < 20000) {}
    if (threadIdx.x == 0) seen[blockIdx.x] = (int)id;
}
"""


def run(folder: Path) -> Json:
    return {f"{number}x{size}": seen_by(split(number, size)) for number, size in ((2, 64), (4, 32))}


def control() -> bool:
    """Two groups that are the same multiprocessors."""
    group = split(2, 64)[0]
    return not seen_by([group, group])["disjoint_eager"]


def seen_by(groups: list[Group]) -> Json:
    cupy = importlib.import_module("cupy")
    kernel = cupy.RawKernel(SOURCE, "where")
    elsewhere = own_stream()
    eager, graphed, rules = [], [], []
    for group in groups:
        stream = group.stream()
        seen = torch.full((NUM_BLOCKS,), -1, dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()

        def work(stream: Any = stream, seen: torch.Tensor = seen) -> None:
            with cupy.cuda.ExternalStream(stream.cuda_stream):
                kernel((NUM_BLOCKS,), (32,), (seen.data_ptr(),))

        work()
        torch.cuda.synchronize()
        eager.append(set(seen.tolist()))
        seen.fill_(-1)
        graph, _ = captured(work, stream)
        launch(graph, elsewhere)
        torch.cuda.synchronize()
        graphed.append(set(seen.tolist()))
        rules.append(event_rules(stream, elsewhere))
    return {
        "multiprocessors": [group.num_multiprocessors for group in groups],
        "seen_eager": [len(ids) for ids in eager],
        "seen_in_graph_launched_elsewhere": [len(ids) for ids in graphed],
        "disjoint_eager": disjoint(eager),
        "graph_keeps_group": [a <= b for a, b in zip(graphed, eager, strict=True)],
        "event_of_primary_context": rules,
    }


def event_rules(of_group: torch.cuda.Stream, of_torch: torch.cuda.Stream) -> Json:
    """The driver's answers to an event of torch's context on a stream of a group."""
    cu = driver()
    disable_timing = 2
    event = checked(cu.cuEventCreate(disable_timing))
    recorded = cu.cuEventRecord(event, of_group.cuda_stream)[0].name
    checked(cu.cuEventRecord(event, of_torch.cuda_stream))
    return {
        "record": recorded,
        "wait": cu.cuStreamWaitEvent(of_group.cuda_stream, event, 0)[0].name,
    }


def disjoint(sets: list[set[int]]) -> bool:
    return len(set().union(*sets)) == sum(map(len, sets))

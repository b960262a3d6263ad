"""CPU microseconds of the driver's calls, through cuda-bindings; a trivial call shows its share."""

import time
from pathlib import Path

import torch

from .frame import Json
from .tools import DEVICE, call_us, captured, checked, driver, own_stream, warm

NODES = (1, 10, 100, 1000)


def run(folder: Path) -> Json:
    cu, stream = driver(), own_stream()
    here = stream.cuda_stream
    disable_timing = 2
    event = checked(cu.cuEventCreate(disable_timing))
    context = checked(cu.cuCtxGetCurrent())
    source = torch.ones(1024, device=DEVICE)
    target = torch.zeros_like(source)
    to, source_at, num_bytes = target.data_ptr(), source.data_ptr(), 4 * source.numel()
    costs = {
        "cuDriverGetVersion": call_us(cu.cuDriverGetVersion),
        "cuEventRecord": call_us(lambda: checked(cu.cuEventRecord(event, here))),
        "cuStreamWaitEvent": call_us(lambda: checked(cu.cuStreamWaitEvent(here, event, 0))),
        "cuMemcpyAsync": call_us(lambda: checked(cu.cuMemcpyAsync(to, source_at, num_bytes, here))),
        "cuCtxSetCurrent": call_us(lambda: checked(cu.cuCtxSetCurrent(context))),
        "torch tensor.add_": call_us(lambda: source.add_(1)),
    }
    for nodes in NODES:

        def work(nodes: int = nodes) -> None:
            for _ in range(nodes):
                target.add_(1)

        warm(work, stream)
        graph, _ = captured(work, stream)
        costs[f"cuGraphLaunch, nodes {nodes}"] = launch_us(graph, stream)
    return {"us": costs}


def control() -> bool:
    """A call that takes 100 us."""
    return call_us(lambda: time.sleep(1e-4), calls=10, rounds=3) >= 100


def launch_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Few launches a round: a full queue would make the call wait for the GPU."""
    cu, executable, here = driver(), graph.raw_cuda_graph_exec(), stream.cuda_stream
    return call_us(lambda: checked(cu.cuGraphLaunch(executable, here)), calls=20)

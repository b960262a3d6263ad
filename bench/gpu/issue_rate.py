"""Eager issue rate: forward and backward of a tiny model from one thread and from several."""

import threading
import time
from pathlib import Path

import torch
from torch import nn

from .frame import Json
from .tools import DEVICE, own_stream

STEPS = 200


def run(folder: Path) -> Json:
    torch.autograd.set_multithreading_enabled(False)
    steps_per_s(1)  # the clocks of a GPU that was idle rise meanwhile
    return {f"threads {count}": steps_per_s(count) for count in (1, 2, 4, 8)}


def control() -> bool:
    """Steps of which each pauses for 5 ms."""
    return steps_per_s(1, pause_s=5e-3) <= 200


def steps_per_s(num_threads: int, pause_s: float = 0) -> float:
    """Steps of all threads together; the work of each is the same."""
    begin = threading.Barrier(num_threads + 1)
    threads = [threading.Thread(target=issue, args=(begin, pause_s)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    begin.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    return num_threads * STEPS / (time.perf_counter() - start)


def issue(begin: threading.Barrier, pause_s: float) -> None:
    # Thread-local, like the current stream.
    torch.autograd.set_multithreading_enabled(False)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(DEVICE)
    x = torch.randn(16, 64, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(own_stream()):
        model(x).sum().backward()
        torch.cuda.synchronize()
        begin.wait()
        for _ in range(STEPS):
            if pause_s > 0:
                time.sleep(pause_s)
            model(x).sum().backward()

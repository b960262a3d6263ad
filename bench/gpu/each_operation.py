"""Fused operations, forward and backward, for ncu to count: python -m bench.gpu.each_operation.

Behind each comes a kernel that waits, as a mark. With `planted`, one operation alone, and again
with a copy of its argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .tools import DEVICE

# In the name of the kernel that stands between two operations.
MARK = "spin_kernel"


def steps(planted: bool) -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Names, the bytes that an ideal kernel moves, and what is to be counted."""
    found = kernels.operations(DEVICE, kernels.TOKENS, kernels.WIDTH, kernels.HIDDEN)
    for name, operation in found:
        step, num_bytes = kernels.both(operation, operation.ours), kernels.traffic_bytes(operation)
        yield name, num_bytes, step
        if planted:
            yield f"{name} and a copy", num_bytes, partial(with_copy, step, operation.arguments[0])
            return


def with_copy(step: Callable[[], Any], x: Tensor) -> Any:
    return step(), x.detach().clone()


def run(planted: bool) -> None:
    for name, num_bytes, step in steps(planted):
        step()
        torch.cuda.synchronize()
        print(f"operation {num_bytes} {name}", flush=True)
        torch.cuda.profiler.start()
        step()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    run(planted=sys.argv[1:] == ["planted"])

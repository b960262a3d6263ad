"""Times operations that launch kernels, in a process of its own: python -m bench.launches ROUNDS.

The stand-in for a GPU does nothing, so what is left is the host's work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from pykern.kernels.gpu import activation, dropout, rope
from pykern.kernels.gpu import norm_operation as norm
from pykern.kernels.gpu.launching import Launched
from tests.kernels.stand_in import stand_in

CALLS = 100


def operations() -> dict[str, Callable[[], object]]:
    """Operations of a Llama block, and dropout."""
    x = torch.zeros(8, 1024, dtype=torch.bfloat16)
    both, qkv = (torch.zeros(8, width, dtype=torch.bfloat16) for width in (2048, 1536))
    weight = torch.ones(1024, dtype=torch.bfloat16)
    return {
        "add and norm": lambda: norm.add_and_normalise(
            x, x, weight, None, 1e-5, False, x.dtype, 0.0, 0, None
        ),
        "swiglu": lambda: activation.activated(both, None, "swiglu"),
        "rope": lambda: rope.turned(qkv, 8, 2, 10000.0, 0),
        "dropout": lambda: dropout.masked(x, 0.5, 1, None),
    }


def by_jit(self: Launched, grid: Sequence[int]) -> Any:
    """Launches by way of the JIT."""
    return self.kernel[grid]


def main(rounds: int) -> None:
    """Prints, by operation and way, the milliseconds of each round of calls."""
    driver = stand_in()
    triton.compiler.compile = driver.compile
    ways = {"JIT": by_jit, "direct": Launched.__getitem__}
    found: dict[str, dict[str, list[float]]] = {}
    for name, operation in operations().items():
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 3):
            launches = []
            for way, item in ways.items():
                Launched.__getitem__ = item  # type: ignore[method-assign]
                driver.launches.clear()
                start = time.process_time_ns()
                for _ in range(CALLS):
                    operation()
                if number >= 3:
                    samples[way].append((time.process_time_ns() - start) / 1e6)
                launches.append([launch.place for launch in driver.launches])
            assert launches[0] == launches[1]
            assert len(launches[0]) == CALLS
        found[name] = samples
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))

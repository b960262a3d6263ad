"""Executes the compiled kernels of operations, and prints a line of JSON for each operation.

`python -m tests.kernels.ptx --capability 90 --dtype bfloat16 --shape llama` runs a part of the
matrix; see `tests.kernels.ptx.save` for all of it. `--machine-code` adds what ptxas made of each
kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from tests.kernels.ptx import activations, losses, norms, tokens
from tests.kernels.ptx.limits import occupancy
from tests.kernels.ptx.outcome import SHAPES, Given, Operation
from tests.kernels.ptx.save import CAPABILITIES, DTYPES
from tests.kernels.ptx.session import Executed, Session, session
from tests.kernels.sm90 import machine_code, stack_bytes

OPERATIONS: dict[str, Operation] = (
    norms.OPERATIONS | activations.OPERATIONS | losses.OPERATIONS | tokens.OPERATIONS
)


def executed(session: Session, name: str, dtype: str, shape: str) -> dict[str, Any]:
    """One operation, executed and compared with float64.

    Raises:
        AssertionError: a result is off.
        KernelFault: a kernel does what it must not.
    """
    torch.manual_seed(1)
    with session.executing():
        outcome = OPERATIONS[name](Given(SHAPES[shape], getattr(torch, dtype)))
        unwritten = [x.shape for x in outcome.outputs if not session.written(x)]
    # Without rows no kernel is launched, and torch fills the gradients of weights with zeros.
    assert not unwritten or not session.executed, (
        f"nothing writes a part of a result of {unwritten}"
    )
    counts = [launch.counts for launch in session.executed]
    return {
        "operation": name,
        "capability": session.driver.capability,
        "dtype": dtype,
        "shape": shape,
        "kernels": sorted({launch.name for launch in session.executed}),
        "launches": len(counts),
        "instructions": sum(count.warps for count in counts),
        "loads": sum(count.loads for count in counts),
        "stores": sum(count.stores for count in counts),
        "bytes": sum(count.loaded + count.stored for count in counts),
        "least_bytes": outcome.least_bytes,
        "worst_ulps": outcome.worst,
        "stack_bytes": {
            launch.name: num_bytes
            for launch in session.executed
            if (num_bytes := stack_bytes(launch.compiled.asm["cubin"]))
        },
    }


def assembled(launch: Executed) -> dict[str, Any]:
    """The machine code that ptxas made of a kernel, in numbers."""
    metadata = launch.compiled.metadata
    code = machine_code(launch.name, launch.compiled.asm["cubin"], metadata.num_warps * 32)
    capability = metadata.target.arch
    return {
        "kernel": launch.name,
        "registers": code.registers,
        "spills": code.spills,
        "widest_load": max(code.accesses("LDG"), default=0),
        "widest_store": max(code.accesses("STG"), default=0),
        "shared": metadata.shared,
        "threads": code.num_threads,
        "occupancy": occupancy(capability, code.registers, metadata.shared, code.num_threads),
    }


def unsupported(name: str, capability: int) -> bool:
    """Whether a GPU has no instructions for an operation."""
    return "e4m3" in name and capability < 89


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.kernels.ptx", description=__doc__)
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--machine-code", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="each so many-th operation alone")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--only", default="", help="a part of the names of operations")
    options = parser.parse_args()
    run = session(options.capability)
    for name in list(OPERATIONS)[options.first :: options.every]:
        if options.only in name and not unsupported(name, options.capability):
            try:
                line = executed(run, name, options.dtype, options.shape)
                if options.machine_code:
                    line["machine_code"] = [assembled(launch) for launch in run.executed]
            except Exception as error:
                line = {"operation": name, "fault": f"{type(error).__name__}: {error}"}
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

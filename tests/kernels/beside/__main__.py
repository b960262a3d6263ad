"""Executes kernels of pykern, Liger and torch.compile, and prints a line of JSON for each.

`python -m tests.kernels.beside --liger FOLDER` takes Liger from a folder where its wheel was
unpacked; see `tests.kernels.beside.save`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.kernels.beside.compiling import compiling
from tests.kernels.beside.contenders import OPERATIONS, Function, Operation
from tests.kernels.beside.observed import Observed, observed

HIDDEN, INNER = 4096, 14336
# Llama's rows, as on the rest of the page; and so many that programs of a backward, which are at
# most 132 for Liger and 256 for pykern, have several.
FEW, MANY = 4, 528
CASES = [*((name, FEW) for name in OPERATIONS), ("rms_norm", MANY), ("layer_norm", MANY)]
CONTENDERS = ("pykern", "liger", "torch.compile")
# Roundings to bfloat16 between the steps of an operation come to less.
MOST_ERROR = 0.01
Line = dict[str, Any]


class Ran(NamedTuple):
    """A call and its backward.

    Attributes:
        results: of the call; then gradients of its arguments.
        counts: of the forward, and of the backward.
    """

    results: tuple[Sequence[Tensor], Sequence[Tensor]]
    counts: tuple[Line, Line]


def lines(seen: Observed, name: str, rows: int, contender: str) -> list[Line]:
    """The forward and the backward of an operation, executed and compared with float64."""
    torch.manual_seed(1)
    operation = OPERATIONS[name](rows, HIDDEN, INNER)
    function = _function(operation, contender)
    if contender == "torch.compile":
        ran(seen, function, operation.arguments)
    result = ran(seen, function, operation.arguments)
    truth = ran(seen, operation.plain, [x.detach().cpu().double() for x in operation.arguments])
    found: list[Line] = []
    for part, made, exact, counts in zip(
        ("forward", "backward"), result.results, truth.results, result.counts, strict=True
    ):
        error = max(map(_error, made, exact))
        assert error < MOST_ERROR, f"{contender}'s {part} of {name} is off by {error}"
        line = {"operation": name, "rows": rows, "contender": contender, "part": part}
        found.append(line | counts | {"error": error})
    outputs, arguments = _bytes(result.results[0]), _bytes(operation.arguments)
    if not operation.apart:
        return [_together(*found) | {"least_bytes": 2 * arguments + outputs}]
    found[0]["least_bytes"] = arguments + outputs
    found[1]["least_bytes"] = outputs + arguments * (2 if operation.saves else 1)
    return found


def _together(forward: Line, backward: Line) -> Line:
    most = {key: max(forward[key], backward[key]) for key in ("forms", "error")}
    counts = ("kernels", "launches", "of_torch", "instructions", "memory_instructions")
    sums = {key: forward[key] + backward[key] for key in (*counts, "distinct_bytes", "bytes")}
    return forward | sums | most | {"part": "forward and backward"}


def ran(seen: Observed, function: Function, arguments: Sequence[Tensor]) -> Ran:
    """Arguments stay as they are. Gradients that come in are 1."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    seen.clear()
    made = function(*leaves)
    forward = seen.counts()
    results = made if isinstance(made, tuple) else (made,)
    incoming = [torch.ones_like(x) for x in results]
    seen.clear()
    gradients = torch.autograd.grad(results, leaves, incoming)
    return Ran((results, gradients), (forward, seen.counts()))


def _function(operation: Operation, contender: str) -> Function:
    if contender == "pykern":
        return operation.ours
    if contender == "liger":
        return operation.liger()
    torch._dynamo.reset()
    return torch.compile(operation.plain, dynamic=False)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def _error(made: Tensor, exact: Tensor) -> float:
    """The norm of what is off, relative to the norm of what is right."""
    return float((made.detach().cpu().double() - exact).norm() / exact.norm())


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.kernels.beside", description=__doc__)
    parser.add_argument("--liger", default="", help="the folder; Liger is left out without it")
    parser.add_argument("--rows", type=int, default=MANY, help="the most rows of a case")
    parser.add_argument("--only", default="", help="a part of the names of operations")
    options = parser.parse_args()
    if options.liger:
        sys.path.insert(0, options.liger)
    with observed() as seen, compiling(seen):
        for (name, rows), contender in itertools.product(CASES, CONTENDERS):
            if options.only not in name or rows > options.rows:
                continue
            if options.liger or contender != "liger":
                for line in lines(seen, name, rows, contender):
                    print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Executes a large part of the matrix, and keeps the figures that docs/kernel-evidence.md shows.

`python -m tests.kernels.ptx.save` takes half an hour on two busy cores. Then run
`python docs/make_kernel_evidence.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support import programs

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_name("results.jsonl")
CAPABILITIES = (80, 90, 100, 120)
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = ("llama", "odd", "padded", "empty")
Line = dict[str, Any]


@cache
def lines(module: str, *arguments: str) -> list[Line]:
    """The lines that a program of this folder prints, where Triton is not interpreted.

    Raises:
        AssertionError: it failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        environment.setdefault("TRITON_CACHE_DIR", folder)
        program = programs.MODULE.format(name=module)
        done = programs.run(program, *arguments, timeout=3600, environment=environment)
    assert done.returncode == 0, done.stderr
    # The device oracle tells at the end what it has seen.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def cell(capability: int, dtype: str, shape: str, *part: str) -> list[Line]:
    """All operations of one part of the matrix, or some of them."""
    options = ("--capability", str(capability), "--dtype", dtype, "--shape", shape, *part)
    return lines("tests.kernels.ptx", *options)


def planted() -> list[Line]:
    """All planted faults."""
    return lines("tests.kernels.ptx.faults")


def with_stack(found: Iterable[Line]) -> dict[str, int]:
    """The most bytes that a thread keeps in memory beside registers, by kernel."""
    most: dict[str, int] = {}
    for line in found:
        for kernel, num_bytes in line.get("stack_bytes", {}).items():
            most[kernel] = max(most.get(kernel, 0), num_bytes)
    return most


def summary(shape: str, found: Sequence[Line]) -> Line:
    """The figures of all executions with a shape, in one line."""
    worst: dict[str, float] = {}
    for line in found:
        for dtype, error in line.get("worst_ulps", {}).items():
            worst[dtype] = max(worst.get(dtype, 0.0), error)
    return {
        "summary": shape,
        "operations": len(found),
        "launches": sum(line.get("launches", 0) for line in found),
        "instructions": sum(line.get("instructions", 0) for line in found),
        "faults": [line["fault"] for line in found if "fault" in line],
        "stack_bytes": with_stack(found),
        "worst_ulps": worst,
    }


def matrix() -> list[tuple[int, str, str]]:
    """Capability, dtype and shape: all for Llama's shape; for others one dtype on each GPU."""
    everything = [(c, d, "llama") for d, c in itertools.product(DTYPES, CAPABILITIES)]
    for place, shape in enumerate(SHAPES[1:]):
        for index, capability in enumerate(CAPABILITIES):
            everything.append((capability, DTYPES[(place + index) % 3], shape))
    return everything


def _kept(folder: Path, which: tuple[int, str, str]) -> list[Line]:
    """A part of the matrix, executed unless an earlier run has left it."""
    path = folder / ("-".join(map(str, which)) + ".json")
    if not path.exists():
        code = ("--machine-code",) if which[1:] == ("bfloat16", "llama") else ()
        found = cell(*which, *code)
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


def main() -> None:
    from bench.report import environment  # noqa: PLC0415

    where = environment("python -m tests.kernels.ptx.save")
    folder = ROOT / "build/ptx" / str(where["commit"])
    folder.mkdir(parents=True, exist_ok=True)
    cells = matrix()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = pool.map(lambda which: _kept(folder, which), cells)
        found = dict(zip(cells, parts, strict=True))
    kept: list[Line] = [{**where, "triton": version("triton")}]
    for shape in SHAPES:
        all_of_it = [line for key, part in found.items() if key[2] == shape for line in part]
        kept.append(summary(shape, all_of_it))
    kept += [line for key, part in found.items() if key[2] == "llama" for line in part]
    kept += planted()
    RESULTS.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))


if __name__ == "__main__":
    main()

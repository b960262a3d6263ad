"""Writes docs/kernel-evidence.md: the compiled code of kernels, executed by an interpreter.

Run from anywhere: python docs/make_kernel_evidence.py. The figures are those that
`python -m tests.kernels.ptx.save` has kept; a test compares the page with what this makes.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/kernel-evidence.md"
RESULTS = ROOT / "tests/kernels/ptx/results.jsonl"
BESIDE = ROOT / "tests/kernels/beside/results.jsonl"
CAPABILITIES = (80, 90, 100, 120)
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = {
    "llama": "Llama 3 8B cut to 4 rows",
    "odd": "5 rows of 1,001, 333 or 5,003 columns, which nothing divides",
    "padded": "3 rows of 1,000, 520 or 4,104 columns, 7 elements between rows, 3 before the first",
    "empty": "no rows; routing alone launches kernels, for its counts",
}
Line = dict[str, Any]

_HEAD = """\
# Kernel evidence

Triton compiles each kernel of `pykern/kernels/gpu` to PTX, the assembly that `ptxas` takes. No GPU
is needed for that. An interpreter in `tests/kernels/ptx` executes this text in numpy, for all
threads of a grid, with the arguments of the launch. The tables are of those executions, and of the
machine code that `ptxas` makes.

The interpreter refuses:

- an access outside of the tensors that a launch was given, or in the gap between two rows;
- an address that is not a multiple of the bytes of the access;
- a read of memory that nothing wrote: of outputs, of shared memory;
- a race: two threads at one byte, one of them writing another value, that no barrier orders;
- a barrier to which a part of a block comes, or a shuffle in a warp that is not whole;
- an instruction, a modifier or a directive that it does not know, float64 among them, whose rate is
  1 in 64 on many GPUs;
- a part of a result that no kernel writes.

Results are compared with float64. An element may be off by half an ulp of its type, and by some
roundings of float32 for the terms that are added up
([the rule](../tests/kernels/acceptance.py)). Dropout has the bits of the CPU's form. So have scales
of the stash, restored tensors, choices of routing and values beside rotary embedding. A result that
a backward makes again has the bits of the forward.

    .venv/bin/pytest tests/kernels/ptx                 each operation once, on one of four GPUs
    .venv/bin/pytest -m nightly tests/kernels/ptx      all of the matrix
    .venv/bin/python -m tests.kernels.ptx.save         keeps the figures for this page

Every operation below is executed for sm_80, sm_90, sm_100 and sm_120; e4m3 needs sm_89. Llama's
shape is executed in bfloat16, float16 and float32, other arguments in one of them for each GPU. The
nightly tests execute all of them in all three. On 2026-11-28 these 48 tests passed, in 19 minutes
and one process (AMD EPYC, family 26, model 2; torch 2.13.0+cpu, Triton 3.7.1).

| arguments | executions | launches | instructions of warps | faults | worst error in ulps |
|---|--:|--:|--:|--:|---|
"""
_TABLES = """\
## Memory instructions and errors

Llama 3 8B cut to 4 rows: hidden size 4,096, 14,336 columns of an activation, 32 and 8 heads of 128,
128,256 classes (2 rows). Long rows are 2 of 20,480. Memory instructions are loads and stores of
global memory, counted for warps, in all launches of the operation. Bytes are for sm_90: those of
the 32-byte sectors that each such instruction asks for. The minimum reads each argument once and
writes each result once. Few rows share the weights here, so it is farther away than with many.
Results that are "made again" count forward and backward. Errors are the worst, in ulps of the type;
0 stands where bits or steps are compared instead.

"""
_TABLE = """\
### {dtype}

| operation | memory instructions: sm_80 | sm_90 | sm_100 | sm_120 | bytes | times the minimum \
| error: sm_80 | sm_90 | sm_100 | sm_120 |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
_BESIDE = """\
## Beside Liger and torch.compile

The device oracle gives torch a GPU that is the host. On it the same arguments go to pykern, to
Liger {liger}, and to `torch.compile` of plain torch. The interpreter executes each of their kernels
for sm_90, in bfloat16. Liger's own launchers choose its blocks; Inductor writes the kernels of
torch.compile for an H100's properties.

- Launches are those of kernels and, behind the plus, of torch's own operations. Such an operation
  counts as the bytes of its arguments and results.
- Bytes are those of sectors, as above. The last but one column counts each byte once per launch,
  as if a cache kept it.
- The minimum is that of arguments and results. Saved statistics are not in it.
- Inductor times some forms of each kernel on a GPU. Here the form with the fewest bytes counts.
- The error is the norm of the difference from float64, relative to the norm of the result. One
  rounding to bfloat16 is 0.0017.
- RoPE: Liger takes queries and keys apart and turns them in place, so torch copies them first.
  Liger and plain torch read tables of cosines and sines, while pykern computes angles.
- Cross entropy: gradients take the memory of the logits in pykern and in Liger.
- Programs of Liger's backwards of norms are as many as multiprocessors, 132. Each writes its sums,
  also with 4 rows; 528 rows are 4 for each program.

No time is in these figures. Instructions are of warps, of kernels alone: pykern's activations have
more of them than Liger's, and its backwards of norms write more sums than Liger's for many rows.

    .venv/bin/pip install --no-deps --target build/liger liger-kernel=={liger}
    .venv/bin/python -m tests.kernels.beside.save

| operation | rows | part | by | launches | instructions | bytes | times the minimum \
| each byte once | error |
|---|--:|---|---|--:|--:|--:|--:|--:|--:|
"""
_FAULTS = """\
## Planted faults

A test plants each fault into the text of a compiled kernel, for sm_90. The interpreter or the
comparison must find it.

| fault | in | found as |
|---|---|---|
"""
_SECOND_OPINION = """\
## A second opinion

The sanitizer of triton-viz interprets the source of a kernel, and asks z3 whether an address can be
outside of the launch's tensors. It can execute 12 of the 16 kernels that were launched, and finds
all of their 60 launches inside. Each launch is made again for each tensor, which then lacks its
last element: each of the 12 kernels is told for it, in 160 of 207 cases. Backwards of norms are
32 of the other 47. It stops at an operation that it does not know in `dropout._kernel`,
`rope._kernel`, `routing._place` and `row_sums._kernel`, in GELU, and in norms with dropout.

    pip install triton-viz==3.0
    python -m tests.kernels.second_opinion

Ran on 2026-11-28 with triton-viz 3.0, torch 2.13.0+cpu and Triton 3.7.1.

"""
_MACHINE_CODE = """\
## Machine code

`ptxas` compiles the kernels of the bfloat16 table. A cell has four numbers of the kernel's forms:

- the most registers of a thread;
- the most accesses to what did not fit into registers;
- the widest load and store of global memory, in bits;
- the smallest share of a multiprocessor's warps that are resident, by registers, shared memory and
  threads.

| kernel | threads | sm_80 | sm_90 | sm_100 | sm_120 |
|---|--:|---|---|---|---|
"""
_STACK = """\
Threads of these kernels keep bytes in memory of their own, on one of the GPUs and in one of the
dtypes at least. Threads of all others keep none.

| arguments | kernel | bytes of a thread |
|---|---|--:|
"""
_LIMITS = """\
## Limits of this evidence

- No time is measured: nothing here says how fast a kernel is.
- `ptxas` may fuse a multiplication and an addition that PTX leaves apart, so bits on a GPU may
  differ from those here. An explicit fma, a rounding that PTX names, and whole numbers leave no
  choice.
- The interpreter moves fast exponentials, reciprocal roots and quotients by up to two ulps of
  float32, because a GPU's may be off, too. GPUs may be off elsewhere than the interpreter.
- Codes of the stash may be those of a neighbour where two are almost equally near: the compiled
  kernel fuses operations that the CPU's form rounds one by one. Tests hold codes to half a step.
- `kernel_copy` of `pykern/topo` is not executed here.

"""


def made() -> str:
    """The page, from the kept figures."""
    where, *kept = map(json.loads, RESULTS.read_text().splitlines())
    executed = [line for line in kept if "dtype" in line]
    summaries = [line for line in kept if "summary" in line]
    parts = [_HEAD, *map(_summary, summaries), "\n"]
    parts += [_TABLES, *[_of_dtype(executed, dtype) for dtype in DTYPES]]
    parts += [_beside()]
    parts += [_FAULTS, *[_fault(line) for line in kept if "said" in line], "\n", _SECOND_OPINION]
    parts += [_machine_code(executed), _stack(summaries), _LIMITS, _where(where)]
    return "".join(parts)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _summary(line: Line) -> str:
    worst = [f"{dtype} {line['worst_ulps'].get(dtype, 0):.2f}" for dtype in DTYPES]
    counts = (f"{line[key]:,}" for key in ("operations", "launches", "instructions"))
    return _row(SHAPES[line["summary"]], *counts, len(line["faults"]), ", ".join(worst))


def _of_dtype(executed: list[Line], dtype: str) -> str:
    found = {
        (line["operation"], line["capability"]): line for line in executed if line["dtype"] == dtype
    }
    page = _TABLE.format(dtype=dtype)
    for name in dict.fromkeys(name for name, _ in found):
        lines = [found.get((name, capability)) for capability in CAPABILITIES]
        counts = [f"{x['loads'] + x['stores']:,}" if x else "" for x in lines]
        errors = [_error(x, dtype) if x else "" for x in lines]
        of_90 = found[name, 90]
        ratio = of_90["bytes"] / of_90["least_bytes"]
        page += _row(name, *counts, f"{of_90['bytes']:,}", f"{ratio:.2f}", *errors)
    return page + "\n"


def _beside() -> str:
    where, *kept = map(json.loads, BESIDE.read_text().splitlines())
    page = _BESIDE.format(liger=where["liger"])
    order = {(line["operation"], line["rows"], line["part"]): None for line in kept}
    for case in order:
        for line in kept:
            if (line["operation"], line["rows"], line["part"]) == case:
                page += _row(*case, *_of_contender(line))
    return page + "\n" + _where(where) + "\n"


def _of_contender(line: Line) -> list[str]:
    of_kernels, least = line["launches"] - line["of_torch"], line["least_bytes"]
    return [
        line["contender"].capitalize() if line["contender"] == "liger" else line["contender"],
        f"{of_kernels} + {line['of_torch']}" if line["of_torch"] else str(of_kernels),
        f"{line['instructions']:,}",
        f"{line['bytes']:,}",
        f"{line['bytes'] / least:.2f}",
        f"{line['distinct_bytes'] / least:.2f}",
        f"{line['error']:.5f}",
    ]


def _error(line: Line, dtype: str) -> str:
    """The worst error of results in a type, or of float32; 0 where bits are compared."""
    worst = line["worst_ulps"]
    if dtype not in worst:
        return f"{worst['float32']:.2f} of float32" if worst else "0"
    return f"{worst[dtype]:.2f}"


def _fault(line: Line) -> str:
    """Addresses are others in each run."""
    said = re.sub(r", address 0x[0-9a-f]+|(?<=\d\.\d{2})\d+", "", line["said"])
    said = re.sub(r"\s+", " ", said)
    return _row(line["fault"], line["as"], said)


def _machine_code(executed: list[Line]) -> str:
    forms: dict[str, dict[int, list[Line]]] = {}
    for line in executed:
        for code in line.get("machine_code", []):
            of_kernel = forms.setdefault(code["kernel"], {})
            of_kernel.setdefault(line["capability"], []).append(code)
    page = _MACHINE_CODE
    for kernel, of_kernel in forms.items():
        threads = sorted({code["threads"] for codes in of_kernel.values() for code in codes})
        cells = [_cell(of_kernel[capability]) for capability in CAPABILITIES]
        page += _row(kernel, ", ".join(map(str, threads)), *cells)
    return page + "\n"


def _cell(codes: list[Line]) -> str:
    most = {key: max(code[key] for code in codes) for key in codes[0] if key != "kernel"}
    least = min(code["occupancy"] for code in codes)
    return (
        f"{most['registers']}; {most['spills']}; {most['widest_load']}, {most['widest_store']}; "
        f"{100 * least:.0f} %"
    )


def _stack(summaries: list[Line]) -> str:
    page = _STACK
    for line in summaries:
        for kernel, num_bytes in sorted(line["stack_bytes"].items()):
            page += _row(SHAPES[line["summary"]], kernel, num_bytes)
    return page + "\n"


def _where(where: Line) -> str:
    return (
        f"`{where['command']}`, {where['date']}, in parts whose kernels are those of commit "
        f"{where['commit']}, on {where['cpu']}, "
        f"{where['cores']} cores, Python {where['python']}, torch {where['torch']}, "
        f"Triton {where['triton']}.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(made())

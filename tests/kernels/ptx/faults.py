"""Faults that are planted into the text of compiled kernels, which the interpreter must find.

As a program, `python -m tests.kernels.ptx.faults`, it prints a line of JSON for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.kernels.ptx.__main__ import executed
from tests.kernels.ptx.session import Session, session

_BARRIER = re.compile(r"bar\.sync\s+0;")
# The first warp alone comes to the barrier.
_DIVERGENT = "mov.u32 %r90000, %tid.x; setp.lt.u32 %p90000, %r90000, 32; @%p90000 bar.sync 0;"


@dataclass(frozen=True)
class PlantedFault:
    """A fault.

    Attributes:
        name: of what is wrong.
        operation: that shows it.
        dtype: of its arguments.
        shape: likewise.
        edit: plants it.
        found: a part of the message.
    """

    name: str
    operation: str
    dtype: str
    shape: str
    edit: Callable[[str], str]
    found: str


def _first(pattern: str, new: str, text: str) -> str:
    return re.sub(pattern, new, text, count=1)


FAULTS = [
    PlantedFault(
        "a load without its mask",
        "swiglu",
        "bfloat16",
        "odd",
        lambda text: re.sub(r"@%p\d+ (ld\.global)", r"\1", text),
        "out of bounds",
    ),
    PlantedFault(
        "a store without its mask",
        "dropout",
        "float32",
        "odd",
        lambda text: re.sub(r"@%p\d+ (st\.global)", r"\1", text),
        "out of bounds",
    ),
    PlantedFault(
        "a pointer that is not aligned as the kernel supposes",
        "rms_norm",
        "bfloat16",
        "llama",
        partial(_first, r"(ld\.param\.b64\s+(%rd\d+), \[\w+_0\];)", r"\1 add.s64 \2, \2, 2;"),
        "not a multiple of 16 bytes",
    ),
    PlantedFault(
        "a store to shared memory left out",
        "rms_norm",
        "bfloat16",
        "llama",
        partial(_first, r"@%p\d+ st\.shared[^;]*;", ""),
        "shared memory that nothing wrote",
    ),
    PlantedFault(
        "a store of a result left out",
        "swiglu",
        "bfloat16",
        "llama",
        partial(_first, r"@%p\d+ st\.global[^;]*;", ""),
        "off by nan",
    ),
    PlantedFault(
        "a barrier before a read of shared memory left out",
        "rms_norm",
        "bfloat16",
        "llama",
        lambda text: _BARRIER.sub("", text, count=1),
        "race: read of shared memory beside a write",
    ),
    PlantedFault(
        "a barrier between rounds of shared memory left out",
        "layer_norm",
        "bfloat16",
        "llama",
        lambda text: re.sub(r"(?s)(bar\.sync\s+0;.*?bar\.sync\s+0;.*?)bar\.sync\s+0;", r"\1", text),
        "race: ",
    ),
    PlantedFault(
        "a barrier to which a part of a block comes",
        "rms_norm",
        "bfloat16",
        "llama",
        lambda text: _BARRIER.sub(_DIVERGENT, text, count=1),
        "divergent barrier",
    ),
    PlantedFault(
        "a constant of GELU that is off by 2e-5",
        "gelu + bias",
        "float32",
        "odd",
        lambda text: text.replace("0f3F3504F3", "0f3F350600"),
        "off by",
    ),
    PlantedFault(
        "a constant of Philox that is off by 1",
        "dropout",
        "bfloat16",
        "odd",
        lambda text: text.replace("-766435501", "-766435500"),
        "bits differ",
    ),
    PlantedFault(
        "a sum over the wrong lanes of a warp",
        "rms_norm",
        "bfloat16",
        "odd",
        partial(_first, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+,) 16,", r"\1 8,"),
        "off by",
    ),
    PlantedFault(
        "two neighbours in each other's places",
        "swiglu",
        "bfloat16",
        "llama",
        partial(_first, r"(cvt\.rn\.bf16x2\.f32\s+%r\d+,) (%r\d+), (%r\d+)", r"\1 \3, \2"),
        "off by",
    ),
    PlantedFault(
        "an instruction that the interpreter does not know",
        "swiglu",
        "bfloat16",
        "odd",
        partial(_first, r"mul\.f32", "mul.rz.f32"),
        "no such instruction is known",
    ),
]


def message(run: Session, fault: PlantedFault) -> str:
    """The message of the interpreter for a fault; empty if it says nothing.

    Raises:
        ValueError: the text has no place for the fault.
    """
    edited: list[bool] = []

    def edit(text: str) -> str:
        edited.append(fault.edit(text) != text)
        return fault.edit(text)

    run.edit = edit
    try:
        executed(run, fault.operation, fault.dtype, fault.shape)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    finally:
        run.edit = lambda text: text
    if not any(edited):
        raise ValueError(f"nothing is edited for {fault.name}: {said}")
    return said


def main() -> None:
    run = session(90)
    for fault in FAULTS:
        found = message(run, fault)
        print(json.dumps({"fault": fault.name, "as": fault.operation, "said": found}), flush=True)


if __name__ == "__main__":
    main()

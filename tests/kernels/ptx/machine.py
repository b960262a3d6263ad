"""Runs a parsed kernel: all threads of a grid at once, an array for each register.

Threads that have gone different ways wait for those behind them: the block of instructions that
comes first in the text runs next, for the threads that are there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx import arithmetic, comparing
from tests.kernels.ptx.arithmetic import Pure
from tests.kernels.ptx.frame import Frame
from tests.kernels.ptx.memory import MemoryFault
from tests.kernels.ptx.parsed import Address, Instruction, Operand, UnknownPtx
from tests.kernels.ptx.together import execute_special

_MOST_STEPS = 1_000_000


class KernelFault(Exception):
    """A kernel does what it must not: the kernel, the line, the thread, and what."""


@cache
def pure() -> dict[str, Pure]:
    """Instructions that are functions of their operands, by their whole opcode."""
    return arithmetic.pure() | comparing.pure()


def run(frame: Frame) -> None:
    """Runs all threads to their end.

    Raises:
        KernelFault: an access, a barrier or a shuffle that no kernel may make.
        UnknownPtx: an instruction is not known.
    """
    place = np.zeros(frame.num_threads, np.int64)
    end = len(frame.kernel.blocks) - 1
    with np.errstate(all="ignore"):
        for _ in range(_MOST_STEPS):
            first = int(place.min(initial=end))
            if first == end:
                return
            _run_block(frame, place, first)
    raise KernelFault(f"{frame.kernel.name} does not end")


def _run_block(frame: Frame, place: NDArray[np.int64], index: int) -> None:
    here = place == index
    num_threads = int(here.sum())
    num_warps = int(here.reshape(-1, 32).any(1).sum())
    following = np.full(frame.num_threads, index + 1)
    for instruction in frame.kernel.blocks[index]:
        frame.mask = here
        frame.counts.threads += num_threads
        frame.counts.warps += num_warps
        frame.counts.opcodes[instruction.opcode[0]] += num_warps
        try:
            if instruction.guard is not None:
                frame.mask = here & (frame.registers[instruction.guard] ^ instruction.negated)
            if instruction.opcode[0] in ("bra", "ret"):
                following = np.where(frame.mask, _target(frame, instruction), following)
            elif frame.mask.any():
                execute(frame, instruction)
        except MemoryFault as fault:
            raise _located(frame, instruction, fault) from None
        except (UnknownPtx, KeyError) as error:
            where = f"{frame.kernel.name}, line {instruction.line}: {instruction.text}"
            raise UnknownPtx(f"{where}: {error}") from error
    place[here] = following[here]


def _target(frame: Frame, instruction: Instruction) -> int:
    if instruction.opcode[0] == "ret":
        return len(frame.kernel.blocks) - 1
    (label,) = instruction.operands
    assert isinstance(label, str)
    return frame.kernel.labels[label]


def _located(frame: Frame, instruction: Instruction, fault: MemoryFault) -> KernelFault:
    thread = int(frame.numbers[frame.mask][fault.index])
    where = f"block {thread // frame.size}, thread {thread % frame.size}"
    for operand in instruction.operands:
        if isinstance(operand, Address):
            where += f", address {int(frame.address(operand)[fault.index]):#x}"
    return KernelFault(
        f"{frame.kernel.name}, line {instruction.line}, {instruction.text!r}, {where}: {fault}"
    )


def execute(frame: Frame, instruction: Instruction) -> None:
    """One instruction, for the threads of the mask."""
    opcode = ".".join(instruction.opcode)
    found = pure().get(f"{opcode}/{len(instruction.operands)}") or pure().get(opcode)
    if found is None:
        execute_special(frame, instruction)
        return
    operands = _flat(instruction.operands[0])
    sources = instruction.operands[1:]
    if len(operands) != len(found.results) or len(sources) != len(found.sources):
        raise UnknownPtx("another number of operands")
    given: list[Any] = [
        frame.read(operand, kind) for operand, kind in zip(sources, found.sources, strict=True)
    ]
    values = found.function(*given)
    if len(found.results) == 1:
        values = (values,)
    for operand, kind, value in zip(operands, found.results, values, strict=True):
        frame.write(operand, kind, value)


def _flat(operand: Operand) -> list[str]:
    assert isinstance(operand, str)
    return operand.split("|")

"""Moves, loads and stores, and what the threads of a warp or block do together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.frame import Frame
from tests.kernels.ptx.kinds import KINDS, RAW, Numbers, immediate
from tests.kernels.ptx.memory import Integers, MemoryFault
from tests.kernels.ptx.parsed import Address, Instruction, Operand, UnknownPtx

# A NaN of float32, whose bits are easily seen.
_POISON = "0x7FC0DEAD"
_HINTS = ("L1::evict_first", "L1::evict_last", "L2::cache_hint")


def execute_special(frame: Frame, instruction: Instruction) -> None:
    """An instruction that is not a function of its operands in one thread.

    Raises:
        UnknownPtx: it is not known.
    """
    known = _KNOWN.get(instruction.opcode[0])
    if known is None:
        raise UnknownPtx("no such instruction is known")
    known(frame, instruction)


def _require(right: bool, what: str) -> None:
    if not right:
        raise UnknownPtx(what)


def _move(frame: Frame, instruction: Instruction) -> None:
    _, kind = instruction.opcode
    target, source = instruction.operands
    if isinstance(target, list):
        _require(len(target) == 2, "parts are two")
        part = RAW[KINDS[kind].width // 2]
        halves = np.ascontiguousarray(frame.raw(source, KINDS[kind])).view(part).reshape(-1, 2)
        for place, name in enumerate(target):
            if name != "_":
                frame.put(name, halves[:, place])
    elif isinstance(source, list):
        half = KINDS[f"u{4 * KINDS[kind].width}"]
        parts = [
            np.broadcast_to(
                # Half of a pair may be left undefined where nothing uses it.
                frame.raw(name, half) if frame.has_value(name) else immediate(_POISON, half),
                frame.num_threads,
            )
            for name in source
        ]
        _require(len(parts) == 2, "parts are two")
        frame.put(target, np.stack(parts, 1).view(RAW[KINDS[kind].width]).reshape(-1))
    else:
        frame.put(target, frame.raw(source, KINDS[kind]))


def _to_generic(frame: Frame, instruction: Instruction) -> None:
    _require(instruction.opcode == ("cvta", "local", "u64"), "another conversion of addresses")
    target, source = instruction.operands
    frame.put(target, frame.raw(source, KINDS["u64"]))


def _policy(frame: Frame, instruction: Instruction) -> None:
    """A hint for caches, in a register."""
    _require(instruction.opcode[1] == "fractional", "another policy")
    frame.put(instruction.operands[0], immediate("0", KINDS["u64"]))


def _registers(operand: Operand) -> list[str]:
    _require(not isinstance(operand, Address), "an address")
    return operand if isinstance(operand, list) else [operand]  # type: ignore[list-item]


def _form(instruction: Instruction) -> tuple[str, int, str]:
    """The space, the number of registers and the kind of a load or store."""
    _, *modifiers, kind = instruction.opcode
    # Caches hold what is said to be used again; values are the same.
    modifiers = [x for x in modifiers if x not in _HINTS]
    # Without a space the address is generic. Kernels use those for local memory alone.
    space, *vector = modifiers or ["local"]
    _require(space in ("param", "global", "shared", "local"), f"space {space}")
    _require(vector in ([], ["v2"], ["v4"], ["v8"]), f"modifiers {vector}")
    return space, int(vector[0][1:]) if vector else 1, kind


def _load(frame: Frame, instruction: Instruction) -> None:
    space, number, kind = _form(instruction)
    # Another operand is a policy of caches.
    targets, source = _registers(instruction.operands[0]), instruction.operands[1]
    _require(len(targets) == number, "another number of registers")
    if space == "param":
        assert isinstance(source, Address)
        _require(source.offset == 0, "a part of a parameter")
        value = immediate(str(frame.arguments[source.base]), KINDS[kind])
        frame.put(targets[0], value.view(_signed(kind)))
        return
    width = KINDS[kind].width
    addresses = frame.address(source)
    content = frame.load(space, addresses, number * width)
    if space == "global":
        frame.count_global(addresses, number * width, stores=False)
    parts = content.view(RAW[width])
    for place, target in enumerate(targets):
        values = np.zeros(frame.num_threads, RAW[width])
        values[frame.mask] = parts[:, place]
        frame.put(target, values.view(_signed(kind)))


def _signed(kind: str) -> Any:
    """The type of a loaded value, whose sign fills a wider register."""
    width = KINDS[kind].width
    return np.dtype(f"i{width}") if kind[0] == "s" else RAW[width]


def _store(frame: Frame, instruction: Instruction) -> None:
    space, number, kind = _form(instruction)
    target, sources = instruction.operands[0], _registers(instruction.operands[1])
    _require(len(sources) == number, "another number of registers")
    parts = [
        np.broadcast_to(frame.raw(name, KINDS[kind]), frame.num_threads)[frame.mask]
        for name in sources
    ]
    values = np.stack(parts, 1)
    content = np.ascontiguousarray(values).view(np.uint8)
    addresses = frame.address(target)
    frame.store(space, addresses, content)
    if space == "global":
        frame.count_global(addresses, content.shape[1], stores=True)


def _barrier(frame: Frame, instruction: Instruction) -> None:
    _require(instruction.opcode == ("bar", "sync"), "another barrier")
    _require(instruction.operands == ("0",), "a barrier of some threads")
    by_block = frame.mask.reshape(frame.num_blocks, frame.size)
    there: NDArray[np.bool_] = np.any(by_block, axis=1)
    missing = by_block != there[:, None]
    if missing.any():
        first = frame.numbers[missing.reshape(-1)][0]
        text = f"divergent barrier: thread {first % frame.size} of block {first // frame.size}"
        raise MemoryFault(f"{text} does not come", 0)
    frame.epochs[there] += 1


def _whole_warps(frame: Frame) -> None:
    by_warp = frame.mask.reshape(-1, 32)
    if (by_warp.any(1) != by_warp.all(1)).any():
        raise MemoryFault("a warp exchanges values while some of its threads are elsewhere", 0)


def _shuffle(frame: Frame, instruction: Instruction) -> None:
    _, _, way, kind = instruction.opcode
    target, source, offset, clamp, members = instruction.operands
    _require(kind == "b32" and members == "-1", "some threads of a warp")
    assert isinstance(offset, str)
    assert isinstance(clamp, str)
    _whole_warps(frame)
    lanes, by = np.arange(32), int(offset, 0)
    _require((way, clamp) in (("bfly", "31"), ("up", "0"), ("idx", "31"), ("down", "31")), way)
    partner = {"bfly": lanes ^ by, "up": lanes - by, "idx": 0 * lanes + by, "down": lanes + by}[way]
    partner = np.where((partner < 0) | (partner > 31), lanes, partner)
    values = np.broadcast_to(frame.raw(source, KINDS["b32"]), frame.num_threads)
    frame.put(target, values.reshape(-1, 32)[:, partner].reshape(-1))


def _reduce(frame: Frame, instruction: Instruction) -> None:
    _, sync, *function = instruction.opcode
    # A number beside a NaN counts.
    known = {"add.s32": np.add.reduce, "max.f32": np.fmax.reduce}
    reduced = known.get(".".join(function))
    if sync != "sync" or reduced is None:
        raise UnknownPtx("another reduction")
    kind = function[-1]
    target, source, members = instruction.operands
    _require(bool((frame.raw(members, KINDS["u32"]) == 0xFFFFFFFF).all()), "some of a warp")
    _whole_warps(frame)
    values = np.broadcast_to(frame.read(source, kind), frame.num_threads).reshape(-1, 32)
    frame.write(target, kind, np.repeat(reduced(values, axis=1), 32))


def _matrices(frame: Frame, instruction: Instruction) -> Iterator[tuple[str, Integers, Integers]]:
    """The register of each 8 x 8 matrix, and the places of a thread's two halves.

    Each quarter of the threads has the addresses of the rows of one matrix. A thread has two
    neighbours of a row, or of a column if matrices are transposed.
    """
    _, sync, aligned, size, number, *layout = instruction.opcode
    _require((sync, aligned, size) == ("sync", "aligned", "m8n8"), "another form of matrices")
    transposed = layout == ["trans", "shared", "b16"]
    _require(transposed or layout == ["shared", "b16"], "another layout of matrices")
    _whole_warps(frame)
    operands = sorted(instruction.operands, key=lambda x: isinstance(x, Address))
    registers, rows = _registers(operands[0]), frame.address(operands[1]).reshape(-1, 32)
    _require(len(registers) == int(number[1:]), "another number of registers")
    one, two = np.arange(32) // 4, 2 * (np.arange(32) % 4)
    for matrix, register in enumerate(registers):
        first = 8 * matrix
        if transposed:
            lower, upper = rows[:, first + two] + 2 * one, rows[:, first + two + 1] + 2 * one
        else:
            lower, upper = rows[:, first + one] + 2 * two, rows[:, first + one] + 2 * two + 2
        yield register, lower.reshape(-1), upper.reshape(-1)


def _load_matrices(frame: Frame, instruction: Instruction) -> None:
    for register, *places in _matrices(frame, instruction):
        halves = np.concatenate([frame.load("shared", place, 2) for place in places], 1)
        values = np.zeros(frame.num_threads, np.uint32)
        values[frame.mask] = halves.view(np.uint32)[:, 0]
        frame.put(register, values)


def _store_matrices(frame: Frame, instruction: Instruction) -> None:
    for register, *places in _matrices(frame, instruction):
        raw: Numbers = np.broadcast_to(frame.raw(register, KINDS["b32"]), frame.num_threads)
        content = np.ascontiguousarray(raw[frame.mask]).view(np.uint8).reshape(-1, 4)
        for place, half in zip(places, (content[:, :2], content[:, 2:]), strict=True):
            frame.store("shared", place, half)


_KNOWN: dict[str, Callable[[Frame, Instruction], None]] = {
    "mov": _move,
    "cvta": _to_generic,
    "createpolicy": _policy,
    "ld": _load,
    "st": _store,
    "bar": _barrier,
    "shfl": _shuffle,
    "redux": _reduce,
    "ldmatrix": _load_matrices,
    "stmatrix": _store_matrices,
}

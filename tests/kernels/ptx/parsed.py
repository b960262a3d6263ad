"""The text of a kernel in PTX, as instructions in basic blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# Bytes of a register by its declared type; a predicate is a boolean.
_WIDTHS = {"pred": 0, "b16": 2, "b32": 4, "b64": 8, "f32": 4}
_DIRECTIVES = (
    ".version",
    ".target",
    ".address_size",
    ".loc",
    ".file",
    ".extern",
    ".global",
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".pragma",
)


class UnknownPtx(Exception):
    """Text that the interpreter does not know; it is never passed over."""


class Address(NamedTuple):
    """An operand in brackets: a register or a symbol, and bytes behind it."""

    base: str
    offset: int


Operand = str | Address | list[str]


@dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
        line: of the text, from 1.
        text: of the instruction.
        guard: the predicate that must hold, if any.
        negated: whether it must not hold.
        opcode: with its modifiers, parted at dots.
        operands: results first.
    """

    line: int
    text: str
    guard: str | None
    negated: bool
    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]


@dataclass
class Kernel:
    """A parsed kernel.

    Attributes:
        name: of its entry.
        parameters: their names, in order, with their bytes.
        widths: bytes of registers by the letters of their names; 0 for predicates.
        blocks: instructions without a jump into or out of their midst.
        labels: the index of a block by its label.
        local: bytes of the local memory of a thread.
    """

    name: str = ""
    parameters: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    local: int = 0

    def width(self, register: str) -> int:
        """Bytes of a register."""
        return self.widths[register.rstrip("0123456789")]


def parsed(text: str) -> Kernel:
    """The one kernel of a text.

    Raises:
        UnknownPtx: a line is neither an instruction nor a directive that is known to do nothing.
    """
    kernel = Kernel()
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.split("//")[0].strip()
        if line.startswith(".section"):
            break
        if line not in ("", "{", "}", "(", ")"):
            _take(kernel, number, line)
    kernel.blocks = [*kernel.blocks, []]
    return kernel


def _take(kernel: Kernel, number: int, line: str) -> None:
    if found := re.match(r"\.visible \.entry (\w+)\(?$", line):
        kernel.name = found[1]
    elif found := re.match(r"\.param \.[a-z](\d+)(?: \.ptr[^,]*?)? (\w+),?$", line):
        kernel.parameters[found[2]] = int(found[1]) // 8
    elif found := re.match(r"\.reg \.(\w+)\s+([%\w]+?)(?:<\d+>)?;$", line):
        kernel.widths[found[2]] = _WIDTHS[found[1]]
    elif found := re.match(r"\.local \.align \d+ \.b8\s+__local_depot0\[(\d+)\];$", line):
        kernel.local = int(found[1])
    elif found := re.match(r"(\$[\w$]+):$", line):
        if kernel.blocks[-1]:
            kernel.blocks.append([])
        kernel.labels[found[1]] = len(kernel.blocks) - 1
    elif not line.startswith(_DIRECTIVES):
        _take_instructions(kernel, number, line)


def _take_instructions(kernel: Kernel, number: int, line: str) -> None:
    # Inline assembly has registers of its own, in braces.
    if found := re.match(r"\{\s*\.reg \.(\w+) (\w+);(.*;)\s*\}$", line):
        kernel.widths[found[2]] = _WIDTHS[found[1]]
        line = found[3]
    if not line.endswith(";"):
        raise UnknownPtx(f"line {number}: {line}")
    for text in filter(None, map(str.strip, line.split(";"))):
        instruction = _instruction(number, text)
        kernel.blocks[-1].append(instruction)
        if instruction.opcode[0] in ("bra", "ret"):
            kernel.blocks.append([])


def _instruction(number: int, text: str) -> Instruction:
    found = re.match(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
    if not found:
        raise UnknownPtx(f"line {number}: {text}")
    negated, guard, opcode, rest = found.groups()
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
    operands = tuple(map(_operand, pieces))
    return Instruction(number, text, guard, bool(negated), tuple(opcode.split(".")), operands)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return [part.strip() for part in text[1:-1].split(",")]
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(base, int(offset or "0", 0))
    return text

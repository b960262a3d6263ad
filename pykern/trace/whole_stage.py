"""All instructions of a stage as one function of Python's, whose variables are the values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .routes import BATCH
from .tape import Instruction
from .values import Ref, refs_in

if TYPE_CHECKING:
    from .cut_tape import CutTape

# Lines of Python, without their indentation.
Lines = Sequence[str]


class WholeStage:
    """A stage's instructions of a cut tape, with the values that come in and go out.

    Each value is a variable of the function, named as `named` does: entries of a dictionary, and
    calls of functions, take longer.

    Args:
        cut_tape: whose.
        stage: its number.

    Attributes:
        come: numbers of the values that come in from the stage before, or the batch.
        senders: others that values come from, `BATCH` among them, with their numbers.
        go: numbers of the values that go to the next stage.
        farther: the stages after it that get values, with their numbers.
        output: what the model returns, as an expression; None if this is not the last stage.
    """

    def __init__(self, cut_tape: CutTape, stage: int) -> None:
        ways = cut_tape.ways
        self._cut_tape, self._pieces = cut_tape, cut_tape.pieces_of(stage)
        self.come, (self.go, self.farther) = ways[stage][0], ways[stage + 1]
        self.senders = [
            (sender, numbers)
            for sender, (_, farther) in enumerate(ways[: stage + 1], BATCH)
            for reader, numbers in farther
            if reader == stage
        ]
        self.output = self._output() if stage + 2 == len(ways) else None

    def compiled(self, head: Lines, begin: Lines, end: Lines, names: dict[str, Any]) -> Any:
        """A function that makes the function of the stage, which gets a microbatch.

        Args:
            head: lines around that function. The first one is that of the outer function, and has
                the argument `parts`, the segments of the stage as it runs them.
            begin: lines before those of the instructions; they set the values that come in.
            end: lines after them.
            names: what the lines use.
        """
        names = {**names, "Tensor": Tensor, "taken": _taken, "output": self._cut_tape.output}
        returned = set() if self.output is None else set(refs_in(self._cut_tape.tape.output))
        alive = returned.union(self.go, *(numbers for _, numbers in self.farther))
        calls: list[str] = []
        lines: list[str] = []
        for place, piece in reversed(list(enumerate(self._pieces))):
            inside = list(enumerate(self._cut_tape.instructions_of(piece)))
            for number, instruction in reversed(inside):
                name, reads, makes = f"{place}_{number}", instruction.reads, instruction.makes
                dead = {*reads, *makes} - alive
                lines = [*_lines_of(instruction, name, place), *_drop(dead), *lines]
                alive = (alive - set(makes)) | set(reads)
                names[f"at_{name}"], names[f"call_{name}"] = instruction, instruction.target
                key = instruction.simple[0]
                if key is not None:
                    calls.append(f"call_{name} = modules_{place}[{key!r}]")
            if any(instruction.simple[2] is None for _, instruction in inside):
                lines.insert(0, f"here = here_of_{place}(None)")
            lines[:0] = [f"v{n} = v{n}.clone()" for n in self._cut_tape.copied[piece]]
        come = {*self.come, *(number for _, numbers in self.senders for number in numbers)}
        parts = [f"_, here_of_{n}, modules_{n} = parts[{n}]" for n in range(len(self._pieces))]
        source = [
            *(head[:1]),
            *(f" {line}" for line in [*head[1:], *parts, *calls, "def forward(microbatch):"]),
            *(f"  {line}" for line in [*begin, *_drop(come - alive), *lines, *end]),
            " return forward",
        ]
        exec(compile("\n".join(source), "<stage of a recorded forward>", "exec"), names)
        return names["make"]

    def _output(self) -> str:
        output = self._cut_tape.tape.output
        if isinstance(output, Ref):
            return named([output.number])
        return f"output({_dict_of(refs_in(output))}, here_of_{len(self._pieces) - 1})"


def named(numbers: Iterable[int]) -> str:
    """The variables of values, with commas between them."""
    return ", ".join(f"v{number}" for number in numbers)


def _lines_of(instruction: Instruction, name: str, place: int) -> list[str]:
    """Lines of Python that make a call, for the segment at a place of the stage."""
    _, _, first, second, result = instruction.simple
    if first is not None:
        given = f"v{first}" if second is None else f"v{first}, v{second}"
        return [
            f"v{result} = call_{name}({given})",
            f"if not isinstance(v{result}, Tensor): v{result} = taken(at_{name}, v{result})",
        ]
    made = sorted({*instruction.results, *instruction.makes})
    return [
        f"here.values = values = {_dict_of(instruction.reads)}",
        f"at_{name}.run(here, modules_{place})",
        *(f"v{number} = values[{number}]" for number in made),
        "here.values = values = None",
    ]


def _taken(instruction: Instruction, returned: Any) -> Any:
    """The one value in what a call has returned beside it."""
    values: dict[int, Any] = {}
    instruction.take(returned, values)
    return values[instruction.results[0]]


def _drop(numbers: Collection[int]) -> list[str]:
    return [f"del {named(sorted(numbers))}"] if numbers else []


def _dict_of(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(f"{number}: v{number}" for number in sorted(set(numbers))) + "}"

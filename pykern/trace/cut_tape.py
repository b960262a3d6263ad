"""A tape cut into pieces, and the values that go from one piece to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..once import once
from .between import Between
from .routes import BATCH, Direct, Routes, everywhere
from .tape import Instruction, Tape
from .values import Here, Ref, builder, refs_in
from .whole_stage import WholeStage

# By number.
Values = dict[int, Any]
# The numbers of values that go past the next stage, by their stage, in ascending order.
Farther = Sequence[tuple[int, Sequence[int]]]
# Gives values, and what a segment holds.
HereOf = Callable[[Values], Here]
# Gives what the model returns.
Output = Callable[[Values, HereOf], Any]
# Runs instructions on an environment, and leaves in it what later pieces need; gets what a segment
# holds and calls, too. Returns the environment; the last piece returns what the model returns.
Piece = Callable[["Environment", HereOf, Mapping[str, Any]], Any]


class Environment:
    """The values that the pieces of a cut tape still need, on their way from one to the next.

    It is a tree to torch, whose leaves are the tensors.

    Attributes:
        cut_tape: whose values they are.
        values: by number.
    """

    __slots__ = ("cut_tape", "values")

    def __init__(self, cut_tape: CutTape, values: Values) -> None:
        self.cut_tape = cut_tape
        self.values = values

    def in_one_stage(self) -> Environment:
        """The same values for pieces that one caller runs: none of them goes past a stage."""
        cut_tape = self.cut_tape
        whole = CutTape(cut_tape.tape, cut_tape.ends, [0] * len(cut_tape.ends))
        return Environment(whole, self.values)

    def apart(self, stage: int) -> tuple[Environment, Farther]:
        """Values that go from a stage, or `BATCH`, to the next one, and which ones go farther."""
        near, farther = self.cut_tape.ways[stage + 1]
        values = self.values
        return Environment(self.cut_tape, {number: values[number] for number in near}), farther


pytree.register_pytree_node(
    Environment,
    lambda env: (list(env.values.values()), (env.cut_tape, tuple(env.values))),
    lambda tensors, of: Environment(of[0], dict(zip(of[1], tensors, strict=True))),
    serialized_type_name="pykern.trace.Environment",
    flatten_with_keys_fn=lambda env: (
        [(pytree.MappingKey(number), value) for number, value in env.values.items()],
        (env.cut_tape, tuple(env.values)),
    ),
)


def _piece(
    instructions: Sequence[Instruction],
    needed: set[int],
    returned: set[int],
    copied: Sequence[int],
    output: Output | None,
) -> Piece:
    """A function for some of a tape's instructions, one after another.

    Straight lines of Python take half the time of a loop over the instructions.

    Args:
        instructions: these.
        needed: numbers of the values that later pieces need.
        returned: of those that the model returns, for the last piece.
        copied: of those that come into the piece and are copied, because they are written.
        output: what the last piece returns; None for others.
    """
    names: dict[str, Any] = {"Tensor": Tensor, "output": output}
    lines = ["return env" if output is None else "return output(values, here_of)"]
    alive = needed | returned
    for place, instruction in reversed(list(enumerate(instructions))):
        lines[:0] = _lines_of(instruction, {*instruction.reads, *instruction.makes} - alive, place)
        names[f"at_{place}"], names[f"call_{place}"] = instruction, instruction.target
        alive |= set(instruction.reads)
    if not all(any(instruction.simple) for instruction in instructions):
        lines.insert(0, "here = here_of(values)")
    lines[:0] = [f"values[{number}] = values[{number}].clone()" for number in copied]
    head = ["def run(env, here_of, modules):", "values = env.values"]
    exec(compile("\n ".join([*head, *lines]), "<piece of a recorded forward>", "exec"), names)
    return names["run"]  # type: ignore[no-any-return]


def _lines_of(instruction: Instruction, dead: set[int], place: int) -> list[str]:
    """Lines of Python that make the call at a place, and drop the values that are dead then."""
    key, _, first, second, result = instruction.simple
    if first is None:
        lines = [f"at_{place}.run(here, modules)"]
    else:
        call = f"call_{place}" if key is None else f"modules[{key!r}]"
        given = f"values[{first}]"
        if first in dead and first not in {second, result}:
            given, dead = f"values.pop({first})", dead - {first}
        if second is not None:
            given += f", values[{second}]"
        lines = [
            f"made = {call}({given})",
            f"if isinstance(made, Tensor): values[{result}] = made",
            f"else: at_{place}.take(made, values)",
        ]
    return [*lines, *(f"values.pop({number}, None)" for number in sorted(dead))]


def _output_of(tape: Tape) -> Output:
    """A function that gives what the model returns: mostly one tensor, which is a value."""
    if isinstance(tape.output, Ref):
        number = tape.output.number
        return lambda values, _: values[number]
    build = builder(tape.output)
    return lambda values, here_of: build(here_of(values))


class CutTape:
    """A tape in pieces, one for each segment of the chain.

    Args:
        tape: the whole.
        ends: for each piece, the number of instructions that it and those before it have.
        stage_of: for each piece, the stage that runs it.
        direct: where values can go past stages.

    Attributes:
        tape, ends: as given.
        pieces: in order, each a function.
        copied: by piece, the values that its stage writes and that are not the stage's own; all
            in the first piece of the stage.
        pieces_of: gives the numbers of a stage's pieces.
        output: gives what the model returns.
        inputs: numbers of the tensors among the forward's arguments that any piece needs.
        ways: for the batch and then each stage, which values go to the next stage, and which to
            each farther one.

    Raises:
        CutError: a value that crosses from stage to stage is written where that would be lost, or
            crosses where nobody hands it over.
    """

    def __init__(
        self,
        tape: Tape,
        ends: Sequence[int],
        stage_of: Sequence[int],
        direct: Direct = everywhere,
    ) -> None:
        self.tape = tape
        self.ends = ends
        self._stage_of = stage_of
        between = Between(tape, ends, stage_of)
        self.pieces_of, self._pieces = between.pieces_of, between.pieces
        users, makers = between.users, between.makers
        self.inputs = sorted(users.keys() - makers.keys())
        num_stages = stage_of[-1] + 1
        routes = Routes(
            num_stages,
            users,
            makers,
            tape.trained,
            lambda low, high: direct(low, high, tape.with_gradients),
        )
        self.ways = [(routes.near(s), routes.farther(s)) for s in range(BATCH, num_stages)]
        self.copied: list[list[int]] = [[] for _ in self._pieces]
        for stage, values in enumerate(between.copied):
            self.copied[self.pieces_of(stage)[0]] = values
        self.output = _output_of(tape)
        self.pieces = list(self._cut(routes))[::-1]

    @once
    def whole_stages(self) -> list[WholeStage]:
        """By stage, all of its instructions as one function."""
        return [WholeStage(self, stage) for stage in range(len(self.ways) - 1)]

    def instructions_of(self, piece: int) -> Sequence[Instruction]:
        """The instructions of a piece, in order."""
        return self._pieces[piece]

    def _cut(self, routes: Routes) -> Iterator[Piece]:
        """The pieces, last first."""
        needed: set[int] = set()
        output: Output | None = self.output
        wanted = set(refs_in(self.tape.output))
        stage = self._stage_of[-1]
        for piece, inside in reversed(list(enumerate(self._pieces))):
            if self._stage_of[piece] < stage:
                stage = self._stage_of[piece]
                needed = routes.leaving(stage)
            yield _piece(inside, needed, wanted, self.copied[piece], output)
            output = None
            made = {value for instruction in inside for value in instruction.makes}
            read = {value for instruction in inside for value in instruction.reads}
            needed = (needed | wanted | read) - made
            wanted = set()

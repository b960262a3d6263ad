"""F and B of stages of a recorded forward as straight code, where no feature is in force.

All stages of a replica run so in a step, or none does: values go from stage to stage in tuples,
without an environment around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ...trace.cut_tape import CutTape
from ...trace.routes import BATCH
from ...trace.whole_stage import WholeStage, named
from . import backward
from .forward import are_segments, bare_parts, drawing
from .hand_over import HandOver
from .transport import Transport

if TYPE_CHECKING:
    from .stage import Run, Stage

# By microbatch, values on their way past stages, and those of them that get a gradient.
Skipping = list[tuple[Sequence[Tensor], Sequence[Tensor]]]
_EMPTY: tuple[Sequence[Tensor], Sequence[Tensor]] = (), ()
# Makes F from a stage, the values that come past others and those that go past others, the
# hand-over, and the stage's segments as it runs them.
MakeRun = Callable[..., "Run"]
# By cut tape, one for each stage.
_MAKES: WeakKeyDictionary[CutTape, list[MakeRun]] = WeakKeyDictionary()


def enter(stages: Sequence[Stage], arguments: Sequence[tuple[Any, ...] | None]) -> None:
    """Takes the model's arguments by microbatch.

    All stages of a replica must have begun, with the layers that they run in this step.
    """
    first = stages[0]
    if not all([_is_bare(stage) for stage in stages]):
        first.enter(arguments)
        return
    cut_tapes = {given[0].cut_tape for given in arguments if given is not None}
    if len(cut_tapes) != 1:
        first.enter(arguments)
        return
    (cut_tape,) = cut_tapes
    near, farther = cut_tape.ways[0]
    of_batch: dict[int, Skipping] = {reader: [_EMPTY] * len(arguments) for reader, _ in farther}
    for microbatch, given in enumerate(arguments):
        if given is not None:
            values = given[0].values
            first.arguments[microbatch] = tuple([values[number] for number in near])
            for reader, numbers in farther:
                of_batch[reader][microbatch] = tuple([values[number] for number in numbers]), ()
    _compose(stages, cut_tape, of_batch)


def _is_bare(stage: Stage) -> bool:
    """Whether nothing but draws of known kinds is in force."""
    if type(stage.transport) is not Transport or not (stage.layers and are_segments(stage.layers)):
        return False
    # Backwards in another step, and R, continue from what F leaves.
    goes_on = stage.recomputed.has_levels or getattr(stage.finish, "keeps_graphs", False)
    is_watched = stage.look is not None or stage.look_back is not None
    if goes_on or is_watched:
        return False
    return not stage.draws.possible or stage.draws.known() is not None


def _compose(stages: Sequence[Stage], cut_tape: CutTape, of_batch: dict[int, Skipping]) -> None:
    """Has each stage run straight code in this step."""
    wholes, num_microbatches = cut_tape.whole_stages, len(stages[0].arguments)
    if cut_tape not in _MAKES:
        _MAKES[cut_tape] = [_make_of(whole) for whole in wholes]
    skipping = {(BATCH, reader): values for reader, values in of_batch.items()}
    for stage, whole in zip(stages, wholes, strict=True):
        for reader, _ in whole.farther:
            skipping[stage.index, reader] = [_EMPTY] * num_microbatches
    for stage, whole, make in zip(stages, wholes, _MAKES[cut_tape], strict=True):
        come = [skipping[sender, stage.index] for sender, _ in whole.senders]
        go = [skipping[stage.index, reader] for reader, _ in whole.farther]
        end = stage.hand_over if stage.next is None else _to_later(stage, whole, go)
        run = make(stage, come, go, end, bare_parts(stage.layers))
        back = backward.straight(stage)
        if whole.farther or any([sender != BATCH for sender, _ in whole.senders]):
            back = backward.with_parcels(stage, back, None)
        if stage.draws.possible:
            run = drawing(stage, run, stage.draws.known())
            back = backward.watched(stage, back)
        stage.bare_forward, stage.bare_backward = run, back


def _make_of(whole: WholeStage) -> MakeRun:
    """Writes the F of a stage: takes values, runs the instructions, and hands values over."""
    head = [
        "def make(stage, come, go, hand_over, parts):",
        "arguments, outputs = stage.arguments, stage.outputs",
        "leaves, opened, following = stage.leaves, stage.parcels.opened, stage.next",
        *(f"come_{place} = come[{place}]" for place in range(len(whole.senders))),
        *(f"go_{place} = go[{place}]" for place in range(len(whole.farther))),
    ]
    begin = [
        "given = arguments[microbatch]",
        "if given is None: return",
        "arguments[microbatch] = None",
        *([f"{named(whole.come)}, = given"] if whole.come else []),
        "del given",
    ]
    for place, (sender, numbers) in enumerate(whole.senders):
        begin += [
            f"({named(numbers)},), mine = come_{place}[microbatch]",
            f"come_{place}[microbatch] = empty",
            "if mine:",
            " leaves[microbatch] = *leaves[microbatch], *mine",
            f" opened.setdefault(microbatch, []).append(({sender}, len(mine)))",
            "del mine",
        ]
    end = [f"outputs[microbatch] = hand_over(microbatch, {whole.output})"]
    if whole.output is None:
        end = _handing_over(whole)
    return whole.compiled(head, begin, end, {"empty": _EMPTY})  # type: ignore[no-any-return]


def _handing_over(whole: WholeStage) -> list[str]:
    """Lines that give values to later stages, without a loop where all get a gradient."""
    near = whole.go
    numbers = [*near, *(number for _, some in whole.farther for number in some)]
    values = f"({named(numbers)},)" if numbers else "()"
    tests = [f"v{number}.requires_grad" for number in numbers]
    if len(near) > 1:
        tests.append(f"len({{{', '.join(f'id(v{number})' for number in near)}}}) == {len(near)}")
    lines = [
        *(f"w{number} = v{number}.detach().requires_grad_()" for number in numbers),
        f"landed = {_landed(near)}",
        "following.arguments[microbatch] = following.leaves[microbatch] = landed",
        *(
            f"landed = {_landed(some)}; go_{place}[microbatch] = landed, landed"
            for place, (_, some) in enumerate(whole.farther)
        ),
        f"outputs[microbatch] = {values}",
    ]
    return [
        f"if {' and '.join(tests) or True}:",
        *(f" {line}" for line in lines),
        f"else: outputs[microbatch] = hand_over(microbatch, {values})",
    ]


def _landed(numbers: Sequence[int]) -> str:
    return "(" + "".join(f"w{number}, " for number in numbers) + ")"


def _to_later(stage: Stage, whole: WholeStage, go: Sequence[Skipping]) -> HandOver:
    """Gives values to later stages, of which some get no gradient, or are one tensor."""
    following, num_near = stage.next, len(whole.go)
    assert following is not None

    def hand_over(microbatch: int, values: Sequence[Tensor]) -> Sequence[Tensor]:
        near, others = values[:num_near], iter(values[num_near:])
        once = {id(value): value for value in near}
        leaves = {key: _leaf_of(value) for key, value in once.items()}
        following.arguments[microbatch] = tuple([leaves[id(value)] for value in near])
        following.leaves[microbatch] = _trained(leaves.values())
        for skipping, (_, numbers) in zip(go, whole.farther, strict=True):
            sent = [_leaf_of(next(others)) for _ in numbers]
            skipping[microbatch] = sent, _trained(sent)
        return _trained([*once.values(), *values[num_near:]])

    return hand_over


def _leaf_of(value: Tensor) -> Tensor:
    leaf = value.detach()
    return leaf.requires_grad_() if value.requires_grad else leaf


def _trained(values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple([value for value in values if value.requires_grad])

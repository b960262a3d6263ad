"""A model with a forward of its own, as a chain of segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..tensors.strides import copy_of
from ..tensors.trees import Call, map_tree
from .between import why_not
from .call_modes import modes_now
from .cut_tape import CutTape, Environment
from .errors import CutError, UnseenTensor, Unsettled
from .key import key_of_call
from .opened import (
    alike,
    can_open,
    opened_by_names,
    opened_by_size,
    require_openable,
    smaller,
    whole_by_names,
)
from .origins import Origins
from .recorded_often import RecordedOften
from .recorder import Recorder
from .routes import Direct, everywhere
from .segment import Segment
from .state_reader import StateReader
from .tape import Tape
from .tape_cache import Key, Moment, TapeCache
from .untouched import Untouched
from .values import held_in


class Traced:
    """A model whose forward has been recorded, and the segments that it is cut into.

    A tape is for inputs of some shapes and strides, for the values beside tensors among them, and
    for the modes of the caller and of the modules that are cut: others are recorded when they first
    come, which runs the forward once and leaves no trace in the model or in torch's random numbers.

    Args:
        model: an `nn.Module`.
        sample: a call, as large as a microbatch.
        num_stages: how many stages it is to be cut into.
        split_at: names of the modules that stages begin with; empty for the size of modules to
            decide what is looked into.
        whole: names of modules that are not looked into.

    Attributes:
        segments: by name.
        origins: of what forwards have made while they were recorded.

    Raises:
        CutError: the forward cannot be cut; the message says where and why.
    """

    _recorder: Callable[..., Recorder] = Recorder

    def __init__(
        self,
        model: nn.Module,
        sample: Call,
        num_stages: int,
        split_at: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        self._model = model
        self.origins = Origins()
        # Called where other runs of the model have to end first.
        self._settle: Callable[[], None] = lambda: None
        self._whole = whole_by_names(dict(model.named_modules()), whole)
        self._opened = self._first_opened(num_stages, split_at)
        self._reader = StateReader(model, self._opened)
        tape = self._record_opening(sample, num_stages)
        self._anchors = _anchors(tape)
        self.segments = {
            name: Segment(number) for number, name in enumerate(_numbered(self._anchors))
        }
        # Those whose mode the forward may look at: what is looked into, and what it calls.
        self._modes = [
            module
            for parent in model.modules()
            if parent in self._opened
            for module in (parent, *parent.children())
        ]
        self._stage_of = [0] * len(self.segments)  # by segment
        self._direct: Direct = everywhere
        self._state = self._reader.now()
        self._cut_tapes = TapeCache()
        self._often, self._num_refreshes = RecordedOften(self._reader), 0
        self._cut_tape(tape, (key_of_call(sample)[1], self._now()))

    def cut(self, spans: Iterable[range], devices: Sequence[torch.device], direct: Direct) -> None:
        """Says which segments are in which stage, where that is, and what reaches what from there.

        Args:
            spans: by stage, its segments.
            devices: by stage.
            direct: where values can go past stages.
        """
        segments = list(self.segments.values())
        for stage, (span, device) in enumerate(zip(spans, devices, strict=True)):
            for number in span:
                self._stage_of[number] = stage
                segments[number].device = None if device.type == "cpu" else device
        self._direct = direct
        self._cut_tapes.replace(
            lambda known: CutTape(known.tape, known.ends, self._stage_of, direct)
        )

    def before_recording(self, settle: Callable[[], None]) -> None:
        """Sets the function to call before a forward runs to be recorded."""
        self._settle = settle

    def environments(self, calls: Sequence[Call]) -> list[Environment]:
        """The first segment's input for each microbatch of a batch, in the modes of now.

        Raises:
            CutError: these inputs lead another way through the model, which cannot be cut so.
        """
        now, entered = self._now(), list[Environment]()
        # The last call's arguments have these, and nothing else tells its tape from another.
        shapes: list[torch.Size] = []
        for args, kwargs in calls:
            if shapes and [one.shape for one in args] == shapes:
                cut_tape, values = entered[-1].cut_tape, dict(enumerate(args))
            else:
                inputs, called = key_of_call((args, kwargs))
                values = dict(enumerate(inputs))
                known = self._cut_tapes.of((called, now))
                holding = (one for one in known if not one.tape.reads or self._holds(one, values))
                found = next(holding, None)
                if found is None:
                    self._settle()
                    tape = self._record_settled((args, kwargs))
                    now = self._now()
                    found = self._cut_tape(tape, (called, now))
                    self._often.recorded(self._num_refreshes, (called, now))
                cut_tape = found
                tells = list(map(id, args)) == list(map(id, inputs)) and not cut_tape.tape.reads
                shapes = [one.shape for one in inputs if tells]
            entered.append(Environment(cut_tape, {n: values[n] for n in cut_tape.inputs}))
        return entered

    def why_not_at(self, segment: int) -> str | None:
        """The reason why no stage can begin with a segment, in any recorded forward; or None."""
        found = (why_not(known.tape, known.ends, segment) for known in self._cut_tapes)
        return next(filter(None, found), None)

    def refresh(self) -> None:
        """Has the segments hold the model's parameters and buffers of now.

        Raises:
            CutError: a module that is looked into must stay whole by now.
            RuntimeError: a module that stays whole is another by now.
        """
        require_openable(self._opened, self._model)
        self._state = self._reader.now()
        self._num_refreshes += 1
        for segment in self.segments.values():
            segment.refresh()

    def forget(self) -> None:
        """Forgets all cut tapes, because modules that stay whole compute in another way by now."""
        self._cut_tapes.clear()

    def _first_opened(self, num_stages: int, split_at: Sequence[str]) -> set[nn.Module]:
        """The modules that are looked into, as far as is known without a recording."""
        by_names = opened_by_names(self._model, split_at, self._whole)
        return by_names if split_at else opened_by_size(self._model, num_stages, self._whole)

    def _record_opening(self, sample: Call, num_stages: int) -> Tape:
        """The tape of the sample; opens what has to be for it."""
        while True:
            require_openable(self._opened, self._model)
            try:
                tape = self._record(sample)
            except UnseenTensor as error:
                module = error.module
                if module is None or module in self._whole or not can_open(module):
                    raise
                self._opened |= alike(self._model, module) - self._whole
                continue
            found = smaller(self._model, self._opened, self._whole)
            if len(_anchors(tape)) >= num_stages or found is None:
                return tape
            self._opened.add(found)

    def _record_settled(self, call: Call) -> Tape:
        """The tape of a call that runs; the model may change in it what it changes but once.

        Such as RWKV, which scales its weights when it is called for the first time in a mode.
        """
        try:
            tape = self._record(call)
        except Unsettled:
            self._record(call, settling=True)
            tape = self._record(call)
        # Attributes may be others by now.
        self._state = self._reader.now()
        return tape

    def _record(self, call: Call, *, settling: bool = False) -> Tape:
        # A forward may write into what it is given, and look at strides.
        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = copy_of(leaf.detach()).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        args, kwargs = map_tree(copy, call)
        inputs = list(copies.values())
        home = inputs[0].device if inputs else torch.device("cpu")
        model = self._model
        # The recorder has aliases in the places of parameters, which take the writes.
        untouched = Untouched(model, self._opened, settling=settling, writing=False)
        held = [*model.parameters(), *model.buffers()]
        with self._reader.recording(), self.origins.without(held), untouched.kept():
            recorder = self._recorder(model, self._opened, home, self.origins, untouched.generators)
            tape = recorder.record(model, inputs, (args, kwargs), settling=settling)
            untouched.require()
            return tape

    def _now(self) -> Moment:
        """The modes and settings that tell tapes for calls with the same key apart."""
        training = tuple([module.training for module in self._modes])
        return (modes_now(), torch.is_inference_mode_enabled(), training), self._state

    def _holds(self, cut_tape: CutTape, values: dict[int, Any]) -> bool:
        reads = cut_tape.tape.reads
        held = {held for read in reads for held in read.held}
        model = self._model
        parameters = {one.key: model.get_parameter(one.name) for one in held if one.is_parameter}
        buffers = {one.key: model.get_buffer(one.name) for one in held if not one.is_parameter}
        return all(read.holds(values, parameters, buffers) for read in reads)

    def _starts(self, tape: Tape) -> list[int]:
        """For each segment, the number of the tape's first instruction that is for it."""
        starts: list[int | None] = [None] * len(self._anchors)
        at = 0
        for number, instruction in enumerate(tape.instructions):
            anchor = instruction.anchor
            if anchor is None:
                continue
            if anchor in self._anchors[at:]:
                at = self._anchors.index(anchor, at)
                starts[at] = number
                at += 1
            elif self._trains(anchor):
                raise CutError(
                    f"for these inputs or modes the forward calls {anchor} ({instruction.where}) "
                    "where it did not for the sample. Give a sample for which the forward calls it"
                )
        starts[0] = 0
        following = len(tape.instructions)
        found: list[int] = []
        for start in reversed(starts):
            following = following if start is None else start
            found.append(following)
        return found[::-1]

    def _cut_tape(self, tape: Tape, key: Key) -> CutTape:
        """A tape in pieces, for calls of this key with which its reads hold."""
        starts = self._starts(tape)
        ends = [*starts[1:], len(tape.instructions)]
        for segment, start, end in zip(self.segments.values(), starts, ends, strict=True):
            for instruction in tape.instructions[start:end]:
                segment.hold(instruction, self._model)
        segment.hold_tensors(held_in(tape.output), self._model)
        cut_tape = CutTape(tape, ends, self._stage_of, self._direct)
        self._cut_tapes.add(key, cut_tape)
        return cut_tape

    def _trains(self, anchor: str) -> bool:
        module = dict(self._model.named_modules()).get(anchor)
        return module is None or next(module.parameters(), None) is not None


def _anchors(tape: Tape) -> list[str]:
    """Where a tape can be cut: before calls of modules, and of functions given parameters."""
    return [i.anchor for i in tape.instructions if i.anchor is not None]


def _numbered(names: Sequence[str]) -> list[str]:
    """The names, those that occur again with the number of the time."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found

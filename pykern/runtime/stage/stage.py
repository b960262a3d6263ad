"""What actions do to the tensors of one stage. A stage knows its neighbours, never its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...modes import both
from ...plan import Kind
from ...trace import Environment
from ...trace.routes import BATCH
from ..autograd.cut import copies, cut, hidden_in
from ..autograd.landing import Landing
from ..autograd.split import Work, backward_to_inputs
from ..microbatch import to_device
from ..random.eager import Draws, StepSeed
from ..recompute.recompute import Calls, Level, Recompute, run
from .keywords import keywords_of
from .settings import Settings
from .skips import Parcels, apart, ends_of
from .transport import Passage

_CPU = torch.device("cpu")

# The tensors that backward starts from and their gradients, both empty when there is no backward.
Ends = tuple[Sequence[Tensor], Sequence[Tensor]]
# Gets (microbatch, output of the last stage, whether no R will give it again).
Finish = Callable[[int, Any, bool], Ends]

# What a backward runs through: outputs, their gradients, and the leaves in front.
Graph = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]


class Stage:
    """Consecutive layers of the model, run forward and backward one microbatch at a time.

    Between two stages the autograd graph is cut: the next stage gets detached leaves, and their
    gradients are where this stage's backward starts. Parameters collect gradients in `.grad` as
    autograd does, in the order of the stage's B and W in the plan.

    One thread at a time runs a stage's actions, not always the same. The dependencies of the plan
    order what neighbours hand over. Attributes that are lists hold one entry per microbatch.
    """

    def __init__(
        self, index: int, layers: Sequence[nn.Module], device: torch.device = _CPU
    ) -> None:
        self.index = index
        # In a step some may be copies of the originals.
        self.originals = self.layers = layers
        self.device = device
        self._finish: Finish | None = None
        self.next: Stage | None = None
        self.previous: Stage | None = None
        # Each adds what another replica of this stage has collected.
        self.reductions: list[Callable[[], None]] = []
        # An in-place layer may not write into a leaf that requires grad, nor into what the previous
        # stage has saved for its backward, nor into the batch, which all microbatches share.
        self.copies_input = False
        # Puts something around the calls of a microbatch.
        self.look: Callable[[int, Calls], Calls] | None = None
        # Likewise around its backward.
        self.look_back: Callable[[int], AbstractContextManager[object]] | None = None
        # Called in front of the first step, and of others before which the layers have changed,
        # with whether torch compiles any.
        self.when_changed: Callable[[bool], None] = lambda _: None
        # By layer, which arguments it can be given by name.
        self._keywords_of = [keywords_of(layer) for layer in layers]
        self._settings: Settings | None = None
        # Whether torch compiles any of the layers.
        self._compiled = False
        self._draws = Draws(index)
        self._recompute = Recompute()
        self.passage = Passage()
        self.parcels = Parcels(index, device)
        self._make_room(0)

    def begin(
        self,
        num_microbatches: int,
        seed: StepSeed,
        finish: Finish,
        levels: Sequence[Level | None] = (),
    ) -> None:
        """Makes room for a step. `levels` says of each microbatch what F keeps; empty: all."""
        # An interrupt may have left something of the last step.
        self._clear(num_microbatches)
        self.go_on(seed, finish, levels)

    def go_on(self, seed: StepSeed, finish: Finish, levels: Sequence[Level | None] = ()) -> None:
        """As `begin`, with the room that there is and what is in it."""
        self._finish = finish
        settings = self._settings
        changed = settings is None or settings.have_changed()
        if settings is None or changed:
            settings = Settings(self.originals)
            self._compiled = settings.compiled
            self.copies_input = any(getattr(one, "inplace", False) for one in settings.modules)
            self.when_changed(self._compiled)
        self._recompute.begin(levels, changed=changed, compiled=self._compiled)
        # Without gradients a step has no loss, which may draw as well.
        compiled_for = self.device if self._compiled else None
        self._draws.begin(seed, (settings, torch.is_grad_enabled()), compiled_for)
        # Last, so that after an interrupt all of this is looked at again.
        self._settings = settings

    def twin(self) -> Stage:
        """A stage of the same layers, which knows what this one has seen them do."""
        twin = Stage(self.index, self.layers, self.device)
        twin._settings, twin._draws = self._settings, self._draws
        twin._recompute = self._recompute.twin()
        twin.copies_input = self.copies_input
        return twin

    @property
    def settings(self) -> Settings | None:
        """Of the layers, in the last step; another object where any has changed."""
        return self._settings

    @property
    def finish(self) -> Finish | None:
        """What the step has been given for its outputs."""
        return self._finish

    @property
    def draws(self) -> Draws:
        """What has been seen of the random numbers of forwards."""
        return self._draws

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""
        self._clear(0)

    def _clear(self, num_microbatches: int) -> None:
        self._finish = None
        self.layers = self.originals
        self._recompute.end()
        self._make_room(num_microbatches)

    def _make_room(self, num_microbatches: int) -> None:
        # What the first layer is called with; None for a microbatch without rows.
        self.arguments: list[tuple[Any, ...] | None] = [None] * num_microbatches
        # The tensors among them whose gradient the previous stage waits for, then those whose
        # gradients farther ones wait for.
        self.leaves: list[Sequence[Tensor]] = [()] * num_microbatches
        # What layers get that name it in their forward; empty where there is nothing.
        self.keywords: Sequence[dict[str, Any]] = ()
        # The tensors that backward starts from, and the gradients that the next stage gives for
        # them; what farther stages give is in the parcels.
        self.outputs: list[Sequence[Tensor]] = [()] * num_microbatches
        self.gradients: list[Sequence[Tensor | None]] = [()] * num_microbatches
        # What I has left for W to do, by microbatch.
        self._weights: dict[int, list[Work]] = {}
        self.parcels.clear()

    def enter(self, arguments: Sequence[tuple[Any, ...] | None]) -> None:
        """Takes what the model is called with, by microbatch, for this stage and later ones."""
        for microbatch, given in enumerate(arguments):
            self.take(microbatch, given)

    def enter_by_name(self, keywords: Sequence[dict[str, Any]]) -> None:
        """Takes what layers get by name, by microbatch, to where the stage is.

        Before any action: a copy between GPUs within one would have both of their lanes wait.
        """
        wanted = frozenset[str]().union(*self._keywords_of)
        mine = [{name: of[name] for name in of if name in wanted} for of in keywords]
        self.keywords = [to_device(of, self.device) for of in mine]

    def take(self, microbatch: int, arguments: tuple[Any, ...] | None) -> None:
        """Takes what the model is called with for one microbatch, to where the stage is.

        Before any action, as `enter_by_name`.
        """
        if arguments and isinstance(arguments[0], Environment):
            near, farther = arguments[0].apart(BATCH)
            arguments = (near,)
            self.parcels.give(microbatch, farther)
        self.arguments[microbatch] = None if arguments is None else self._at_home(arguments)

    def _at_home(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """On the stage's GPU, where it has one: a batch may be on the host, or another's."""
        if self.device.type == "cpu":
            return arguments
        return to_device(arguments, self.device)  # type: ignore[no-any-return]

    def forward(self, microbatch: int) -> None:
        """F: computes the layers and hands the output over to the next stage."""
        arguments = self.arguments[microbatch]
        if arguments is None:
            return
        self.arguments[microbatch] = None
        if self.parcels.come:
            arguments = self._with_parcels(microbatch, *arguments)
        calls = self._calls(microbatch, self._end)
        with self._draws.forward(microbatch) as state:
            if self._recompute.has(microbatch):
                holders = [*self.layers, getattr(self._finish, "function", None)]
                self._recompute.forward(microbatch, calls, arguments, holders, state)
            else:
                with self._recompute.keeping(microbatch):
                    self.outputs[microbatch] = run(calls, arguments)

    def _with_parcels(self, microbatch: int, near: Environment) -> tuple[Environment]:
        """What the previous stage has given together with what has come from farther ones."""
        values, leaves = self.parcels.open(microbatch, self.passage)
        self.leaves[microbatch] = [*self.leaves[microbatch], *leaves]
        return (Environment(near.program, {**near.values, **values}),)

    def recompute(self, microbatch: int) -> None:
        """R: computes once more what F has not kept."""
        calls = self._calls(microbatch, self._end_again)
        self.outputs[microbatch] = self._recompute.again(microbatch, calls)

    def _calls(self, microbatch: int, end: Callable[[int, Any], Sequence[Tensor]]) -> Calls:
        calls: Calls = [self._begin, *self.layers[1:], partial(end, microbatch)]
        if self.keywords and (keywords := self.keywords[microbatch]):
            calls = self._calls_by_name(keywords, partial(end, microbatch))
        return calls if self.look is None else self.look(microbatch, calls)

    def _calls_by_name(self, keywords: dict[str, Any], end: Callable[[Any], Any]) -> Calls:
        first, *others = (
            {name: value for name, value in keywords.items() if name in names}
            for names in self._keywords_of
        )
        layers = zip(self.layers[1:], others, strict=True)
        return [
            partial(self._begin, **first),
            *(partial(layer, **named) for layer, named in layers),
            end,
        ]

    def _begin(self, *arguments: Any, **named: Any) -> Any:
        """What the first layer returns."""
        if self.copies_input:
            arguments = copies(arguments)
        return self.layers[0](*arguments, **named)

    def _end(self, microbatch: int, output: Any) -> Sequence[Tensor]:
        """Hands the output over; returns the tensors that backward starts from."""
        if self.next is None:
            return self._end_again(microbatch, output)
        if self._recompute.has(microbatch):
            self._require_cuttable(output)
        near, farther = apart(output, self.index)
        handed = cut(near, partial(self.passage.there, microbatch, self.index + 1))
        self.next.arguments[microbatch] = (handed.value,)
        self.next.leaves[microbatch] = handed.leaves
        if not farther:
            return handed.outputs
        self.parcels.send(microbatch, farther, self.passage)
        return [*handed.outputs, *ends_of(farther)]

    def _require_cuttable(self, output: Any) -> None:
        names = {type(hidden).__name__ for hidden in hidden_in(output)}
        if names:
            raise TypeError(
                f"stage {self.index} is recomputed and hands over {', '.join(sorted(names))}, "
                "which holds tensors that require grad: a graph can be cut in tuples, lists, dicts "
                "and what else torch.utils._pytree knows, and in nothing else"
            )

    def _end_again(self, microbatch: int, output: Any) -> Sequence[Tensor]:
        """Returns the tensors that backward starts from."""
        if self.next is not None:
            near, farther = apart(output, self.index)
            return [*cut(near).outputs, *ends_of(farther)]
        assert self._finish is not None
        # Were it for this microbatch alone, gradients would add up in another order.
        once = not self._recompute.in_use
        ends = self._finish(microbatch, self.passage.keep(output), once)
        outputs, self.gradients[microbatch] = ends
        return outputs

    def backward(self, microbatch: int) -> None:
        """B: adds to the parameters' `.grad` and hands input gradients to the previous stage."""
        for number, (outputs, gradients, _) in enumerate(self._graphs(microbatch)):
            with self._watched(Kind.B, microbatch, number):
                torch.autograd.backward(outputs, gradients)

    def input_gradients(self, microbatch: int) -> None:
        """I: hands input gradients to the previous stage."""
        works: list[Work] = []
        for number, (outputs, gradients, leaves) in enumerate(self._graphs(microbatch)):
            with self._watched(Kind.I, microbatch, number):
                work = backward_to_inputs(outputs, gradients, leaves, self._finish_weights)
            if work is not None:
                works.append(work)
        if works:
            self._weights[microbatch] = works

    def weight_gradients(self, microbatch: int) -> None:
        """W: adds to the parameters' `.grad` what I has left."""
        works = self._weights.pop(microbatch, [])
        if works:
            with self._watched(Kind.W, microbatch):
                while works:
                    works.pop(0)()

    def _watched(
        self, kind: Kind, microbatch: int, number: int = 0
    ) -> AbstractContextManager[object]:
        """For one graph of a backward, where nothing may be drawn: see `Draws.backward`.

        A layer's own checkpointing makes again in it what F kept.
        """
        mode = self._draws.backward(kind, microbatch, (number, len(self.leaves[microbatch])))
        if self.look_back is not None:
            mode = both(self.look_back(microbatch), mode)
        if not self._recompute.has_levels:
            return mode
        return both(mode, self._recompute.keeping(microbatch))

    @property
    def trains(self) -> Sequence[Tensor]:
        """What an R, or the backward after it, has been seen to collect gradients for."""
        return self._recompute.trains

    def has_weights(self, microbatch: int) -> bool:
        """Whether I has left anything for W to do."""
        return microbatch in self._weights

    def _finish_weights(self) -> None:
        for microbatch in sorted(self._weights):
            self.weight_gradients(microbatch)

    def reduce(self, _: int) -> None:
        """REDUCE: adds to the parameters' `.grad` what other replicas have collected, in turn."""
        for add in self.reductions:
            add()

    def _graphs(self, microbatch: int) -> Iterator[Graph]:
        """What a backward consists of: one graph, or those of the stage's segments, last first.

        Each has outputs, their gradients and leaves, and is gone when the next is asked for. At
        level `layer` the next is made then. In the end the previous stage has its gradients.
        """
        given = self.gradients[microbatch]
        if self.parcels.sent:
            given = [*given, *self.parcels.answers(microbatch)]
        outputs, gradients = _used(self.outputs[microbatch], given)
        self.outputs[microbatch] = self.gradients[microbatch] = ()
        gradients = self.passage.take_in(gradients)
        cell = self._recompute.take(microbatch)
        front = None if cell is None else cell.front()
        while cell is not None and front is not None and outputs:
            landings = list(map(Landing, front.leaves))
            try:
                yield outputs, gradients, front.leaves
            finally:
                found = list(map(Landing.take, landings))
            outputs = ()
            if any(gradient is not None for gradient in found):
                again = cell.outputs(self._calls(microbatch, self._end_again))
                outputs, gradients = _used(again, found)
                del again
            front = cell.front()
        leaves = self.leaves[microbatch]
        landings = list(map(Landing, leaves))
        try:
            if outputs:
                yield outputs, gradients, leaves
        finally:
            found = list(map(Landing.take, landings))
        self._hand_back(microbatch, found)

    def _hand_back(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        if self.previous is not None:
            self.leaves[microbatch] = ()
            if self.parcels.opened:
                gradients = self.parcels.answer(microbatch, gradients, self.passage)
            given = self.passage.back(microbatch, self.index - 1, gradients)
            self.previous.gradients[microbatch] = given


def connect(stages: Sequence[Stage]) -> None:
    """Lets the stages of one replica reach each other."""
    for stage, following in pairwise(stages):
        stage.next, following.previous = following, stage
    for stage in stages:
        stage.parcels.of_stages = [other.parcels for other in stages]


def _used(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The outputs that have gradients, and these."""
    used = [gradient for gradient in gradients if gradient is not None]
    if len(used) < len(gradients):
        pairs = zip(outputs, gradients, strict=True)
        outputs = [output for output, gradient in pairs if gradient is not None]
    return outputs, used

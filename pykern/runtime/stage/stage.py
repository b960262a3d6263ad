"""The work of actions on one stage. A stage knows its neighbours, never its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private import checked_backward, run_backward
from ...trace import Environment, Segment
from ...trace.routes import BATCH
from ..autograd.split import Work
from ..microbatch import to_device
from ..random.draws import Draws
from ..random.seed import StepSeed
from ..recompute.cell import Calls
from ..recompute.recompute import Level, Recompute
from . import backward, by_level, forward, hand_over
from .keywords import keywords_of
from .settings import Settings
from .skips import Parcels
from .steering import Steering
from .transport import Transport

_CPU = torch.device("cpu")

# The tensors that backward starts from and their gradients, both empty when there is no backward.
Ends = tuple[Sequence[Tensor], Sequence[Tensor | None]]
# Gets (microbatch, output of the last stage, whether no R will give it again).
Finish = Callable[[int, Any, bool], Ends]
# Runs an action of one kind and stage for a microbatch, given by its number.
Run = Callable[[int], None]


class Stage:
    """Consecutive layers of the model, run forward and backward one microbatch at a time.

    Between two stages the autograd graph is cut: the next stage gets detached leaves, and this
    stage's backward starts from their gradients. Parameters collect gradients in `.grad` as in
    autograd, in the order of the stage's B and W in the plan.

    One thread at a time runs a stage's actions, not always the same thread. The dependencies of the
    plan order hand-overs between neighbours. List attributes have one entry per microbatch.
    """

    def __init__(
        self, index: int, layers: Sequence[nn.Module], device: torch.device = _CPU
    ) -> None:
        self.index = index
        # During a step, some layers may be copies of the originals.
        self.originals = self.layers = layers
        self.device = device
        self.finish: Finish | None = None
        self.next: Stage | None = None
        self.previous: Stage | None = None
        # Each function adds the gradients of another replica of this stage.
        self.reductions: list[Callable[[], None]] = []
        # In-place layers get copies: they must not write into a leaf that requires grad, into saved
        # tensors of the stage before, or into the batch. A recorded forward copies what it writes.
        # The first F shows whether they write what the stage is given, or what it makes of that.
        self.copies_input = self.looks_at_copies = self._in_place = False
        # Wraps the calls of a microbatch.
        self.look: Callable[[int, Calls], Calls] | None = None
        # Makes a context around the backward of a microbatch.
        self.look_back: Callable[[int], AbstractContextManager[object]] | None = None
        # Each is called with the settings before the first step, and before each step whose layers
        # have changed, whether by the caller or by the last step.
        self.when_changed: list[Callable[[Settings], None]] = []
        # By layer, the names of its keyword arguments.
        self.keywords_of = [keywords_of(layer) for layer in layers]
        # Whether layers are segments of a recorded forward, whose values may skip stages.
        self._is_recorded = any(isinstance(layer, Segment) for layer in layers)
        # The layers' settings in the last step; a new object if any layer has changed.
        self.settings: Settings | None = None
        # The values beside tensors in the batch of the next step, and what steered the last step.
        self.values: tuple[object, ...] = ()
        self._steering = Steering()
        # Whether torch compiles any of the layers.
        self._compiled = False
        # The random states of the stage's actions, and whether any action draws.
        self.draws = Draws(index)
        # The microbatches whose F keeps only inputs, for an R to continue from.
        self.recomputed = Recompute()
        # Moves tensors to the stages beside this one; a GPU's stage has another transport.
        self.transport = Transport()
        # Values of skip connections, which go past the stages in between.
        self.parcels = Parcels(index, device)
        self._make_room(0)

    def begin(
        self,
        num_microbatches: int,
        seed: StepSeed,
        finish: Finish,
        levels: Sequence[Level | None] = (),
    ) -> None:
        """Begins a step. `levels`: the recompute level of each microbatch; empty for none."""
        # An interrupt may have left objects of the last step.
        if self.finish is not None:
            self.end()
        self._make_room(num_microbatches)
        self.go_on(seed, finish, levels)

    def go_on(self, seed: StepSeed, finish: Finish, levels: Sequence[Level | None] = ()) -> None:
        """Continues with the current microbatches; otherwise as `begin`."""
        self.finish = finish
        before = self.settings
        settings = Settings(self.originals) if before is None else before.now()
        changed = settings is not before
        if changed:
            self._compiled = settings.compiled
            in_place = any(getattr(one, "inplace", False) for one in settings.modules)
            self._in_place = in_place and not self._is_recorded
            for notify in self.when_changed:
                notify(settings)
        function = None if self.next else getattr(finish, "function", None)
        steering = self._steering.of(self.values, function)
        changed = changed or steering is not self._steering
        if changed:
            self.copies_input = self.looks_at_copies = self._in_place
        self.recomputed.begin(levels, changed=changed, compiled=self._compiled)
        mode = settings, steering, torch.is_grad_enabled(), function is None
        self.draws.begin(seed, mode, self.device, compiled=self._compiled)
        # The settings are stored last, so that after an interrupt all of this runs again.
        self.settings, self._steering = settings, steering
        self.choose()

    def choose(self) -> None:
        """Composes the functions of F, R and B from the features in force, and nothing else."""
        is_plain = type(self.transport) is Transport
        self.run_backward: Callable[..., object] = run_backward
        # A loss that does its part of the backward at once has gradients that must be checked.
        if self.next is None and not getattr(self.finish, "knows_gradients", False):
            self.run_backward = checked_backward
        self.hand_over: hand_over.HandOver = self._way_out(is_plain=is_plain)
        named = len(self.keywords) > 0 and any(self.keywords_of)
        by_calls = named or self.copies_input or self.look is not None
        # A neighbour stage that only holds handed-over values has no layers.
        by_calls = by_calls or not self.layers
        arrive = None if is_plain else self.transport.arrive
        compute = forward.by_calls(self) if by_calls else forward.straight(self, arrive)
        known = self.draws.known() if is_plain and self.draws.possible else None
        self.bare_recompute: Run = _outside_a_step
        if self.recomputed.has_levels:
            levels = by_level.at_levels(self, compute, known, by_calls=by_calls)
            compute, self.bare_recompute = levels
        if self.draws.possible:
            compute = forward.drawing(self, compute, known)
        if self._is_recorded and (
            self.recomputed.has_levels or by_calls or not forward.are_segments(self.layers)
        ):
            compute = forward.with_parcels(self, compute, arrive)
        if not is_plain and self.previous and getattr(self.finish, "keeps_graphs", False):
            compute = forward.keeping(self, compute)
        self.bare_forward = compute
        self.bare_backward = self._way_back(is_plain=is_plain)

    def _way_out(self, *, is_plain: bool) -> hand_over.HandOver:
        """The hand-over at the end of F. `is_plain`: whether outputs stay in the stage's memory."""
        if self.next is None:
            return hand_over.to_the_end(self, None if is_plain else self.transport.keep)
        if self._is_recorded and is_plain:
            return hand_over.values_to_next(self)
        return hand_over.to_next(self, None if is_plain else self.transport.there)

    def _way_back(self, *, is_plain: bool) -> Run:
        """The function of B."""
        run: Run = partial(backward.graph_by_graph, self)
        if self.look_back is None:
            arrive = None if is_plain or self.next is None else self.transport.take_in
            run = backward.straight(self, arrive)
            if self._is_recorded:
                run = backward.with_parcels(self, run, None if is_plain else self.transport.back)
            if self.recomputed.has_levels:
                run = backward.in_one_segment(self, run)
            run = backward.watched(self, run) if self.draws.possible else run
        return run if is_plain or self.previous is None else backward.giving_back(self, run)

    def twin(self) -> Stage:
        """A stage of the same layers, which shares what this stage has observed of them."""
        twin = Stage(self.index, self.layers, self.device)
        twin.settings, twin.draws = self.settings, self.draws
        twin.values, twin._steering = self.values, self._steering
        twin.recomputed = self.recomputed.twin()
        twin._in_place, twin.copies_input = self._in_place, self.copies_input
        twin.looks_at_copies = self.looks_at_copies
        return twin

    def end(self) -> None:
        """Releases all objects of the step."""
        self.layers = self.originals
        # F and B as composed for this step, with the objects that they hold.
        self.hand_over = _outside_a_step
        self.bare_forward = self.bare_recompute = self.bare_backward = _outside_a_step
        self.recomputed.end()
        self._make_room(0)
        # The last, so that after an interrupt all of this runs again.
        self.finish = None

    def _make_room(self, num_microbatches: int) -> None:
        # The arguments of the first layer; None for a microbatch without rows.
        self.arguments: list[tuple[Any, ...] | None] = [None] * num_microbatches
        # The argument tensors whose gradients the previous stage waits for, then the tensors whose
        # gradients farther stages wait for.
        self.leaves: list[Sequence[Tensor]] = [()] * num_microbatches
        # Keyword arguments for the layers whose forward names them; may be empty.
        self.keywords: Sequence[dict[str, Any]] = ()
        # The tensors that backward starts from, and their gradients from the next stage; gradients
        # from farther stages are in the parcels.
        self.outputs: list[Sequence[Tensor]] = [()] * num_microbatches
        self.gradients: list[Sequence[Tensor | None]] = [()] * num_microbatches
        # By microbatch, the work that I has left for W.
        self._weights: dict[int, list[Work]] = {}
        self.parcels.clear()

    def enter(self, arguments: Sequence[tuple[Any, ...] | None]) -> None:
        """Takes the model's arguments by microbatch, for this stage and later stages."""
        if self.device.type == "cpu" and not self._is_recorded:
            self.arguments[:] = arguments
            return
        for microbatch, given in enumerate(arguments):
            self.take(microbatch, given)

    def enter_by_name(self, keywords: Sequence[dict[str, Any]]) -> None:
        """Takes keyword arguments by microbatch, and copies them to the stage's device.

        Runs before any action: inside an action, a copy between GPUs makes both lanes wait.
        """
        wanted = frozenset[str]().union(*self.keywords_of)
        mine = [{name: of[name] for name in of if name in wanted} for of in keywords]
        self.name([to_device(of, self.device) for of in mine])

    def name(self, keywords: Sequence[dict[str, Any]]) -> None:
        """Takes keyword arguments by microbatch, in a list that may be filled later."""
        self.keywords = keywords
        self.choose()

    def take(self, microbatch: int, arguments: tuple[Any, ...] | None) -> None:
        """Takes the model's arguments for one microbatch, and copies them to the stage's device.

        Runs before any action, as `enter_by_name`.
        """
        if arguments and isinstance(arguments[0], Environment):
            env = arguments[0]
            near, farther = env.cut_tape.ways[BATCH + 1]
            # F changes its environment, and the step would hold what F leaves in the batch.
            values = env.values.copy()
            if farther:
                self.parcels.give(microbatch, env.values, farther)
                values = {number: values[number] for number in near}
            arguments = (Environment(env.cut_tape, values),)
        # A batch may be on the host or on another GPU.
        if arguments is not None and self.device.type != "cpu":
            arguments = self.parcels.move(arguments)
        self.arguments[microbatch] = arguments

    def forward(self, microbatch: int) -> None:
        """F: computes the layers and hands the output over to the next stage."""
        self.bare_forward(microbatch)

    def recompute(self, microbatch: int) -> None:
        """R: recomputes the graph that F has not kept."""
        self.bare_recompute(microbatch)

    def backward(self, microbatch: int) -> None:
        """B: adds to the parameters' `.grad` and hands input gradients to the previous stage."""
        self.bare_backward(microbatch)

    def input_gradients(self, microbatch: int) -> None:
        """I: hands input gradients to the previous stage."""
        works = backward.to_inputs(self, microbatch, self._finish_weights)
        if works:
            self._weights[microbatch] = works

    def weight_gradients(self, microbatch: int) -> None:
        """W: adds the gradients that I has left to the parameters' `.grad`."""
        works = self._weights.pop(microbatch, [])
        if works:
            backward.weights(self, microbatch, works)

    def has_weights(self, microbatch: int) -> bool:
        """Whether I has left work for W."""
        return microbatch in self._weights

    def _finish_weights(self) -> None:
        for microbatch in sorted(self._weights):
            self.weight_gradients(microbatch)

    def reduce(self, _: int) -> None:
        """REDUCE: adds the gradients of other replicas to the parameters' `.grad`, in turn."""
        for add in self.reductions:
            add()


def _outside_a_step(microbatch: int, *_: object) -> Any:
    raise AssertionError(f"microbatch {microbatch} of a stage that has not begun such a step")

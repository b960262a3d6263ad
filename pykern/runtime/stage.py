"""What actions do to the tensors of one stage. A stage knows its neighbours, never its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..plan import Kind
from .microbatch import to_device
from .passage import Passage
from .random import Draws, StepSeed
from .settings import Settings
from .split import Work, backward_to_inputs

_CPU = torch.device("cpu")

# Gets (microbatch, output of the last stage); returns the tensors that backward starts from and
# their gradients, both empty when there is no backward.
Finish = Callable[[int, Any], tuple[Sequence[Tensor], Sequence[Tensor]]]


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
        self.layers = layers
        self.device = device
        self._finish: Finish | None = None
        self.next: Stage | None = None
        self.previous: Stage | None = None
        # Each adds what another replica of this stage has collected.
        self.reductions: list[Callable[[], None]] = []
        # An in-place layer may not write into a leaf that requires grad, nor into what the previous
        # stage has saved for its backward, so it gets a copy.
        self.copies_input = False
        self._settings: Settings | None = None
        self._draws = Draws(index)
        self.passage = Passage()
        self._make_room(0)

    def begin(self, num_microbatches: int, seed: StepSeed, finish: Finish) -> None:
        """Makes room for a step."""
        self._finish = finish
        if self._settings is None or self._settings.have_changed():
            self._settings = Settings(self.layers)
            modules = self._settings.modules
            self.copies_input = any(getattr(module, "inplace", False) for module in modules)
        # Without gradients a step has no loss, which may draw as well.
        self._draws.begin(seed, (self._settings, torch.is_grad_enabled()))
        self._make_room(num_microbatches)

    def twin(self) -> Stage:
        """A stage of the same layers, which knows what this one has seen them do."""
        twin = Stage(self.index, self.layers, self.device)
        twin._settings, twin._draws = self._settings, self._draws
        twin.copies_input = self.copies_input
        return twin

    @property
    def settings(self) -> Settings | None:
        """Of the layers, in the last step; another object where any has changed."""
        return self._settings

    @property
    def may_draw(self) -> bool:
        """Whether a forward may draw random numbers, as far as has been seen."""
        return self._draws.possible

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""
        self._finish = None
        self._make_room(0)

    def _make_room(self, num_microbatches: int) -> None:
        # What the first layer is called with; None for a microbatch without rows.
        self.arguments: list[tuple[Any, ...] | None] = [None] * num_microbatches
        # The tensors among them whose gradient the previous stage waits for.
        self.leaves: list[Sequence[Tensor]] = [()] * num_microbatches
        # The tensors that backward starts from, and the gradients that the next stage gives for
        # them.
        self.outputs: list[Sequence[Tensor]] = [()] * num_microbatches
        self.gradients: list[Sequence[Tensor | None]] = [()] * num_microbatches
        # What I has left for W to do, by microbatch.
        self._weights: dict[int, Work] = {}

    def forward(self, microbatch: int) -> None:
        """F: computes the layers and hands the output over to the next stage."""
        arguments = self.arguments[microbatch]
        if arguments is None:
            return
        self.arguments[microbatch] = None
        if self._draws.possible:
            with self._draws.forward(microbatch):
                self._forward(microbatch, arguments)
        else:
            self._forward(microbatch, arguments)

    def _forward(self, microbatch: int, arguments: tuple[Any, ...]) -> None:
        if self.previous is None:
            if self.device.type != "cpu":
                arguments = to_device(arguments, self.device)
        elif self.copies_input:
            arguments = _copies(arguments)
        first, *others = self.layers
        output = first(*arguments)
        for layer in others:
            output = layer(output)
        if self.next is not None:
            self.outputs[microbatch] = self._hand_over(microbatch, output, self.next)
        else:
            assert self._finish is not None
            ends = self._finish(microbatch, self.passage.keep(output))
            self.outputs[microbatch], self.gradients[microbatch] = ends

    def backward(self, microbatch: int) -> None:
        """B: adds to the parameters' `.grad` and hands input gradients to the previous stage."""
        outputs, gradients = self._take_gradients(microbatch)
        if outputs:
            with self._draws.backward(Kind.B, microbatch, len(self.leaves[microbatch])):
                torch.autograd.backward(outputs, gradients)
        self._hand_back(microbatch)

    def input_gradients(self, microbatch: int) -> None:
        """I: hands input gradients to the previous stage."""
        outputs, gradients = self._take_gradients(microbatch)
        leaves = self.leaves[microbatch]
        with self._draws.backward(Kind.I, microbatch, len(leaves)):
            weights = backward_to_inputs(outputs, gradients, leaves, self._finish_weights)
        if weights is not None:
            self._weights[microbatch] = weights
        self._hand_back(microbatch)

    def weight_gradients(self, microbatch: int) -> None:
        """W: adds to the parameters' `.grad` what I has left."""
        weights = self._weights.pop(microbatch, None)
        if weights is not None:
            with self._draws.backward(Kind.W, microbatch):
                weights()

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

    def _take_gradients(self, microbatch: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The outputs of the microbatch that have gradients, and these."""
        outputs, gradients = self.outputs[microbatch], self.gradients[microbatch]
        self.outputs[microbatch] = self.gradients[microbatch] = ()
        used = [gradient for gradient in gradients if gradient is not None]
        if len(used) < len(gradients):
            pairs = zip(outputs, gradients, strict=True)
            outputs = [output for output, gradient in pairs if gradient is not None]
        return outputs, self.passage.take_in(used)

    def _hand_back(self, microbatch: int) -> None:
        if self.previous is not None:
            leaves = self.leaves[microbatch]
            self.leaves[microbatch] = ()
            gradients = [leaf.grad for leaf in leaves]
            self.previous.gradients[microbatch] = self.passage.back(microbatch, gradients)

    def _hand_over(self, microbatch: int, output: Any, receiver: Stage) -> Sequence[Tensor]:
        """Gives the receiver detached leaves; returns the tensors whose gradients come back."""
        if isinstance(output, Tensor):
            (leaf,) = self.passage.there(microbatch, (output.detach(),))
            if output.requires_grad:
                receiver.leaves[microbatch] = (leaf.requires_grad_(),)
            receiver.arguments[microbatch] = (leaf,)
            return (output,) if output.requires_grad else ()
        values, spec = pytree.tree_flatten(output)
        # A tensor that occurs twice stays one, or its gradients would add up in another order and a
        # layer that works in place would change only one of the two.
        unique = {id(value): value for value in values if isinstance(value, Tensor)}
        outputs = list(unique.values())
        landed = self.passage.there(microbatch, [value.detach() for value in outputs])
        pairs = list(zip(outputs, landed, strict=True))
        receiver.leaves[microbatch] = [
            leaf.requires_grad_() for value, leaf in pairs if value.requires_grad
        ]
        handed = dict(zip(unique, landed, strict=True))
        values = [handed.get(id(value), value) for value in values]
        receiver.arguments[microbatch] = (pytree.tree_unflatten(values, spec),)
        return [value for value in outputs if value.requires_grad]


def _copies(arguments: Any) -> Any:
    """The arguments with a copy of each tensor, one where it occurs twice."""
    if isinstance(arguments[0], Tensor):
        return (arguments[0].clone(),)
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return pytree.tree_map_only(Tensor, copy, arguments)

"""The values of skip connections, which stages send to others than their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...tensors.trees import all_tensors
from ...trace.cut_tape import Environment, Farther, Values
from ...trace.routes import BATCH
from ..microbatch import to_device
from .transport import Arrive, Back, There

if TYPE_CHECKING:
    from .stage import Stage


def apart(output: Any, stage: int) -> tuple[Any, Farther]:
    """The values of a stage, or of the batch, for the next stage, and which ones go farther."""
    return output.apart(stage) if isinstance(output, Environment) else (output, ())


def ends_of(values: Values, farther: Farther) -> list[Tensor]:
    """The values for farther stages that backward starts from."""
    farther_values = (values[number] for _, numbers in farther for number in numbers)
    return [value for value in farther_values if value.requires_grad]


# Values of one microbatch on their way: the stage that they come from, or `BATCH`; the detached
# values, those that get a gradient requiring it; and the latter.
Parcel = tuple[int, Values, Sequence[Tensor]]


class Parcels:
    """The parcels of one stage in a step. All dictionaries are empty without skips.

    Args:
        stage: the stage's number.
        device: of the stage's tensors.

    Attributes:
        of_stages: by stage, the parcels of the same replica.
        come: by microbatch, the parcels that F will open.
        opened: by microbatch, the senders that wait for gradients of the last leaves, each with the
            number of its leaves.
        answers: by microbatch, the gradients from farther stages, in the order of `ends_of`.
        moved: on GPUs, the tensors of the batch that the stage has been given.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self.of_stages: Sequence[Parcels] = ()
        self.come: dict[int, list[Parcel]] = {}
        self.opened: dict[int, list[tuple[int, int]]] = {}
        self.answers: dict[int, Sequence[Tensor | None]] = {}
        self.moved: list[Sequence[Tensor]] = []

    def clear(self) -> None:
        """Releases all parcels."""
        self.moved.clear()
        self.come.clear()
        self.opened.clear()
        self.answers.clear()

    def give(self, microbatch: int, values: Values, farther: Farther) -> None:
        """Gives later stages the values of the batch that they use.

        Runs before any action: inside an action, a copy between GPUs makes both lanes wait.
        """
        for reader, numbers in farther:
            there = self.of_stages[reader]
            mine = there.move({number: values[number] for number in numbers})
            there.come[microbatch] = [(BATCH, mine, ())]

    def move(self, tree: Any) -> Any:
        """A part of the batch on the stage's device, where copies stay until the step ends.

        Their memory is of the caller's streams, which wait for the stage's work at the end of the
        step. Before that, another thread with these streams would get the memory of a copy that a
        kernel has yet to read.
        """
        there = to_device(tree, self._device)
        if self._device.type != "cpu":
            self.moved.append(all_tensors(there))
        return there

    def send(
        self, microbatch: int, values: Values, farther: Farther, there: There | None
    ) -> list[Tensor]:
        """F sends values to the farther stages that use them; returns `ends_of` them."""
        ends: list[Tensor] = []
        # Loops, since a comprehension is a call before Python 3.12.
        for reader, numbers in farther:
            sent = {}
            for number in numbers:
                sent[number] = values[number].detach()
            if there is not None:
                landed = there(microbatch, reader, list(sent.values()))
                sent = dict(zip(numbers, landed, strict=True))
            leaves = []
            for number, leaf in sent.items():
                value = values[number]
                if value.requires_grad:
                    ends.append(value)
                    leaves.append(leaf.requires_grad_())
            come = self.of_stages[reader].come
            come[microbatch] = [*come.get(microbatch, ()), (self._stage, sent, leaves)]
        return ends

    def answer(
        self, microbatch: int, gradients: Sequence[Tensor | None], back: Back | None
    ) -> Sequence[Tensor | None]:
        """B or I sends the gradients of opened parcels back.

        Args:
            microbatch: its number.
            gradients: of the values from the previous stage, then of those of opened parcels.
            back: `Transport.back` of the stage; None where nothing has to move.

        Returns:
            The gradients of the values from the previous stage.
        """
        end = len(gradients)
        for sender, count in reversed(self.opened.pop(microbatch)):
            given, end = gradients[end - count : end], end - count
            if back is not None:
                given = back(microbatch, sender, given)
            # The backward of the farthest stage is the first.
            answers = self.of_stages[sender].answers
            answers[microbatch] = (*given, *answers.get(microbatch, ()))
        return gradients[:end]


def open_parcels(stage: Stage, microbatch: int, env: Environment, arrive: Arrive | None) -> None:
    """F takes the parcels that have come into its values; its B will answer them."""
    here, parcels, answered = env.values, stage.parcels, []
    for sender, values, leaves in parcels.come.pop(microbatch):
        here.update(values)
        mine = leaves
        if arrive is not None and sender != BATCH:
            taken = arrive(list(values.values()))
            here.update(zip(values, taken, strict=True))
            mine = [value for value in taken if value.requires_grad]
        if mine:
            stage.leaves[microbatch] = (*stage.leaves[microbatch], *mine)
            answered.append((sender, len(mine)))
    if answered:
        parcels.opened[microbatch] = answered

"""The values of skip connections, which stages send to others than their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...trace.cut_tape import Environment, Farther, Values
from ...trace.routes import BATCH
from ..microbatch import to_device
from .transport import Transport

if TYPE_CHECKING:
    from .stage import Stage


def apart(output: Any, stage: int) -> tuple[Any, Farther]:
    """The values of a stage, or of the batch, for the next stage, and which ones go farther."""
    return output.apart(stage) if isinstance(output, Environment) else (output, ())


def ends_of(values: Values, farther: Farther) -> list[Tensor]:
    """The values for farther stages that backward starts from."""
    farther_values = (values[number] for _, numbers in farther for number in numbers)
    return [value for value in farther_values if value.requires_grad]


@dataclass(slots=True)
class Parcel:
    """Values of one microbatch on their way to a stage, and the gradients that come back.

    Attributes:
        sender: the stage that they come from, or `BATCH`.
        values: detached; values that get a gradient require it. Empty after arrival.
        leaves: the values that get a gradient, in the graph of the receiving stage.
        gradients: of the leaves, on their way back.
    """

    sender: int
    values: Values
    leaves: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()


class Parcels:
    """The parcels of one stage in a step. All dictionaries are empty without skips.

    Args:
        stage: the stage's number.
        device: of the stage's tensors.

    Attributes:
        of_stages: by stage, the parcels of the same replica.
        come: by microbatch, the parcels that F will open.
        opened: by microbatch, the parcels that B or I will answer.
        sent: by microbatch, the parcels whose answers B or I will take.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self.of_stages: Sequence[Parcels] = ()
        self.come: dict[int, list[Parcel]] = {}
        self.opened: dict[int, list[Parcel]] = {}
        self.sent: dict[int, list[Parcel]] = {}

    def clear(self) -> None:
        """Releases all parcels."""
        self.come.clear()
        self.opened.clear()
        self.sent.clear()

    def give(self, microbatch: int, values: Values, farther: Farther) -> None:
        """Gives later stages the values of the batch that they use.

        Runs before any action: inside an action, a copy between GPUs makes both lanes wait.
        """
        for reader, numbers in farther:
            there = self.of_stages[reader]
            mine = to_device({number: values[number] for number in numbers}, there._device)
            # The list is replaced: a parcel left in it is of a replica that did not run it.
            there.come[microbatch] = [Parcel(BATCH, mine)]

    def send(
        self, microbatch: int, values: Values, farther: Farther, transport: Transport
    ) -> list[Tensor]:
        """F sends values to the farther stages that use them; returns `ends_of` them."""
        ends: list[Tensor] = []
        # Loops, since a comprehension is a call before Python 3.12.
        for reader, numbers in farther:
            before = len(ends)
            detached = []
            for number in numbers:
                detached.append(values[number].detach())
            landed = transport.there(microbatch, reader, detached)
            sent = dict(zip(numbers, landed, strict=True))
            for number, leaf in sent.items():
                value = values[number]
                if value.requires_grad:
                    ends.append(value)
                    leaf.requires_grad_()
            parcel = Parcel(self._stage, sent)
            self.of_stages[reader].come.setdefault(microbatch, []).append(parcel)
            if len(ends) > before:
                self.sent.setdefault(microbatch, []).append(parcel)
        return ends

    def answer(
        self, microbatch: int, gradients: Sequence[Tensor | None], transport: Transport
    ) -> Sequence[Tensor | None]:
        """B or I sends the gradients of opened parcels back.

        Args:
            microbatch: its number.
            gradients: of the values from the previous stage, then of those of opened parcels.
            transport: of the stage.

        Returns:
            The gradients of the values from the previous stage.
        """
        parcels = self.opened.pop(microbatch, ())
        end = len(gradients)
        for parcel in reversed(parcels):
            start = end - len(parcel.leaves)
            parcel.leaves = ()
            parcel.gradients = transport.back(microbatch, parcel.sender, gradients[start:end])
            end = start
        return gradients[:end]

    def answers(self, microbatch: int) -> list[Tensor | None]:
        """B or I takes the gradients that have come back, in the order of `ends_of`."""
        found: list[Tensor | None] = []
        for parcel in self.sent.pop(microbatch, ()):
            found += parcel.gradients
        return found


def open_parcels(stage: Stage, microbatch: int, env: Environment) -> None:
    """F takes the parcels that have come into its values; its B will answer them."""
    parcels, values = stage.parcels, env.values
    leaves = [*stage.leaves[microbatch]]
    for parcel in parcels.come.pop(microbatch):
        if parcel.sender == BATCH:
            values |= parcel.values
            continue
        taken = stage.transport.arrive(list(parcel.values.values()))
        values |= zip(parcel.values, taken, strict=True)
        parcel.values = {}
        before = len(leaves)
        for value in taken:
            if value.requires_grad:
                leaves.append(value)
        if len(leaves) > before:
            parcel.leaves = leaves[before:]
            parcels.opened.setdefault(microbatch, []).append(parcel)
    stage.leaves[microbatch] = leaves

"""The values of skip connections, which stages send to others than their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...trace.cut_tape import Environment, Farther, Values
from ...trace.routes import BATCH
from ..microbatch import to_device
from .transport import Transport


def apart(output: Any, stage: int) -> tuple[Any, Farther]:
    """The values of a stage, or of the batch, for the next stage, and for farther stages."""
    return output.apart(stage) if isinstance(output, Environment) else (output, ())


def ends_of(farther: Farther) -> list[Tensor]:
    """The values for farther stages that backward starts from."""
    return [value for _, values in farther for value in values.values() if value.requires_grad]


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

    def give(self, microbatch: int, farther: Farther) -> None:
        """Gives later stages the values of the batch that they use.

        Runs before any action: inside an action, a copy between GPUs makes both lanes wait.
        """
        for reader, values in farther:
            there = self.of_stages[reader]
            # The list is replaced: a parcel left in it is of a replica that did not run it.
            there.come[microbatch] = [Parcel(BATCH, to_device(values, there._device))]

    def send(self, microbatch: int, farther: Farther, transport: Transport) -> None:
        """F sends values to the farther stages that use them."""
        for reader, values in farther:
            detached = [value.detach() for value in values.values()]
            landed = transport.there(microbatch, reader, detached)
            for value, leaf in zip(values.values(), landed, strict=True):
                leaf.requires_grad_(value.requires_grad)
            parcel = Parcel(self._stage, dict(zip(values, landed, strict=True)))
            self.of_stages[reader].come.setdefault(microbatch, []).append(parcel)
            if any(leaf.requires_grad for leaf in landed):
                self.sent.setdefault(microbatch, []).append(parcel)

    def open(self, microbatch: int, transport: Transport) -> tuple[Values, list[Tensor]]:
        """F opens the parcels that have come.

        Returns:
            The values, and the values among them that get a gradient.
        """
        values: Values = {}
        leaves: list[Tensor] = []
        for parcel in self.come.pop(microbatch, ()):
            if parcel.sender == BATCH:
                values |= parcel.values
                continue
            taken = transport.arrive(list(parcel.values.values()))
            values |= zip(parcel.values, taken, strict=True)
            parcel.values = {}
            parcel.leaves = [value for value in taken if value.requires_grad]
            leaves += parcel.leaves
            if parcel.leaves:
                self.opened.setdefault(microbatch, []).append(parcel)
        return values, leaves

    def answer(
        self, microbatch: int, gradients: Sequence[Tensor | None], transport: Transport
    ) -> Sequence[Tensor | None]:
        """B or I sends the gradients of opened parcels back.

        Args:
            microbatch: its number.
            gradients: of the values from the previous stage, then of the values of `open`.
            transport: of the stage.

        Returns:
            The gradients of the values from the previous stage.
        """
        parcels = self.opened.pop(microbatch, ())
        near = end = len(gradients) - sum(len(parcel.leaves) for parcel in parcels)
        for parcel in parcels:
            start, end = end, end + len(parcel.leaves)
            parcel.leaves = ()
            parcel.gradients = transport.back(microbatch, parcel.sender, gradients[start:end])
        return gradients[:near]

    def answers(self, microbatch: int) -> list[Tensor | None]:
        """B or I takes the gradients that have come back, in the order of `ends_of`."""
        parcels = self.sent.pop(microbatch, ())
        return [gradient for parcel in parcels for gradient in parcel.gradients]

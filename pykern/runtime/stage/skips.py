"""What stages give others that are not their neighbours: the values of skip connections."""

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
    """What a stage, or the batch, gives the next stage, and what it gives farther ones."""
    return output.apart(stage) if isinstance(output, Environment) else (output, ())


def ends_of(farther: Farther) -> list[Tensor]:
    """The tensors that backward starts from."""
    return [value for _, values in farther for value in values.values() if value.requires_grad]


@dataclass(slots=True)
class Parcel:
    """Values of one microbatch on their way to a stage, and the gradients that come back.

    Attributes:
        sender: the stage that they come from, or `BATCH`.
        values: detached; those that get a gradient require it. Empty when they have come.
        leaves: these, in the graph of the stage that has them.
        gradients: what comes back for them.
    """

    sender: int
    values: Values
    leaves: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()


class Parcels:
    """The parcels of one stage in a step. All is empty where nothing skips a stage.

    Args:
        stage: the stage's number.
        device: where it has its tensors.

    Attributes:
        of_stages: by stage, those of the same replica.
        come: by microbatch, what F will open.
        opened: by microbatch, what B or I will answer.
        sent: by microbatch, what B or I has the answers to.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._device = device
        self.of_stages: Sequence[Parcels] = ()
        self.come: dict[int, list[Parcel]] = {}
        self.opened: dict[int, list[Parcel]] = {}
        self.sent: dict[int, list[Parcel]] = {}

    def clear(self) -> None:
        """Lets go of all."""
        self.come.clear()
        self.opened.clear()
        self.sent.clear()

    def give(self, microbatch: int, farther: Farther) -> None:
        """Gives later stages what they use of the batch.

        Before any action: a copy between GPUs within one would have both of their lanes wait.
        """
        for reader, values in farther:
            there = self.of_stages[reader]
            # The first that comes: what is still there is of a replica that did not run it.
            there.come[microbatch] = [Parcel(BATCH, to_device(values, there._device))]

    def send(self, microbatch: int, farther: Farther, transport: Transport) -> None:
        """F hands over what farther stages use."""
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
        """F takes in what has come.

        Returns:
            The values, and those of them that get a gradient.
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
        """B or I gives back the gradients of what has come.

        Args:
            microbatch: which one.
            gradients: of what the previous stage has given, then those of `open`.
            transport: the way out of the stage.

        Returns:
            The former.
        """
        parcels = self.opened.pop(microbatch, ())
        near = end = len(gradients) - sum(len(parcel.leaves) for parcel in parcels)
        for parcel in parcels:
            start, end = end, end + len(parcel.leaves)
            parcel.leaves = ()
            parcel.gradients = transport.back(microbatch, parcel.sender, gradients[start:end])
        return gradients[:near]

    def answers(self, microbatch: int) -> list[Tensor | None]:
        """B or I takes the gradients that have come back, as `ends_of` has the tensors."""
        parcels = self.sent.pop(microbatch, ())
        return [gradient for parcel in parcels for gradient in parcel.gradients]

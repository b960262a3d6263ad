"""A stage at static addresses, to be captured, with slots instead of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels.seeds import provided
from ....plan import Kind
from ....tensors.trees import map_tensors
from ...autograd.graph import leaves_of
from ...loss import Losses
from ...random.seed import StepSeed
from ...recompute.recompute import INPUTS, Level
from ...stage.stage import Stage
from ...stage.transport import Transport
from ..rings import P2PTransfer, RingBuffers, as_bytes, transfers_between

# The slot of a microbatch, and its recompute level.
CellKey = tuple[int, Level | None]


def distinct(cells: Sequence[CellKey]) -> list[CellKey]:
    """The cells without repeats, in their order."""
    return list(dict.fromkeys(cells))


class StaticStage(Transport):
    """The layers of a stage, run on static tensors again and again.

    F reads `inputs` of its slot and its results are `outputs`; B or I reads `incoming` and its
    results are `outgoing`. A replay fills `inputs` and `incoming`, and fetches the results.

    Microbatches that take turns in a slot share the tensors and graphs here if they have the same
    level. Otherwise the slot counts twice here, at the same place in the ring.

    Args:
        original: the stage.
        ring: the memory for its tensors.
        cells: by microbatch, its slot and its level.
        losses: of the step; the last stage computes them.

    Attributes:
        inputs: by slot, the tensors that an F reads.
        outputs: by slot, the tensors that F hands over.
        incoming: by slot, the places for gradients of `outputs` that need one.
        outgoing: by slot, the gradients of `inputs`; None for inputs without.
        seeds: by slot, an int64 tensor of the seeds that its F and R draw.
    """

    def __init__(
        self,
        original: Stage,
        ring: RingBuffers,
        cells: Sequence[CellKey],
        losses: Losses,
    ) -> None:
        self._ring = ring
        self._losses = losses
        self._cells = distinct(cells)
        self._slots = [self._cells.index(cell) for cell in cells]
        self.num_slots = num_slots = len(self._cells)
        self.inputs: list[list[Tensor]] = [[] for _ in range(num_slots)]
        self.outputs: list[list[Tensor]] = [[] for _ in range(num_slots)]
        self.incoming: list[list[Tensor | None]] = [[] for _ in range(num_slots)]
        self.outgoing: list[list[Tensor | None]] = [[] for _ in range(num_slots)]
        like = torch.empty(original.draws.num_seeds, dtype=torch.int64, device=original.device)
        self.seeds = [ring.place((slot, "seeds"), like) for slot, _ in self._cells]
        self._arguments: list[tuple[Any, ...]] = [()] * num_slots
        self._leaves: list[list[Tensor]] = [[] for _ in range(num_slots)]
        # Neighbour stages that only hold handed-over values.
        self._stage = original.twin()
        self._after = Stage(original.index + 1, ()) if original.next is not None else None
        self._before = Stage(original.index - 1, ()) if original.previous is not None else None
        self._stage.next, self._stage.previous = self._after, self._before
        self._stage.transport = self
        for stage in (self._stage, self._after, self._before):
            if stage is not None:
                levels = [level for _, level in self._cells]
                stage.begin(num_slots, StepSeed(), losses, levels)

    def take(self, slot: int, arguments: tuple[Any, ...], leaves: Sequence[Tensor]) -> None:
        """Makes static places for arguments, some of which need gradients.

        Args:
            slot: of the arguments.
            arguments: examples of the stage's arguments.
            leaves: the tensors among the arguments that get a gradient.
        """
        needs = {id(leaf) for leaf in leaves}
        places: dict[int, Tensor] = {}

        def place(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                where = (self.ring_slot(slot), Kind.F, len(places))
                places[id(tensor)] = self._ring.place(where, tensor.detach())
                self.inputs[slot].append(places[id(tensor)])
                if id(tensor) in needs:
                    self._leaves[slot].append(places[id(tensor)].requires_grad_())
            return places[id(tensor)]

        self._arguments[slot] = map_tensors(place, arguments)

    def expect(self, slot: int, gradients: Sequence[Tensor | None]) -> None:
        """Makes static places for gradients of the outputs, like these examples."""
        self.incoming[slot] = [
            None
            if gradient is None
            else self._ring.place((self.ring_slot(slot), Kind.B, index), gradient)
            for index, gradient in enumerate(gradients)
        ]

    def handed(self, slot: int) -> tuple[tuple[Any, ...], Sequence[Tensor]]:
        """The arguments that F has made for the next stage, and the tensors that need gradients."""
        assert self._after is not None
        arguments = self._after.arguments[slot]
        assert arguments is not None
        return arguments, self._after.leaves[slot]

    def to_send(
        self, slot: int, *, shared: bool
    ) -> tuple[Sequence[Tensor | None], list[P2PTransfer]]:
        """The gradients that a B or I sends to another lane, and the transfers that it ends with.

        The next R may be of another slot, and does not wait until these gradients have left. If it
        shares their memory, they move to memory of their slot first.
        """
        made = self.outgoing[slot]
        if not (shared and self.is_recomputed(slot)):
            return made, []
        places = [
            None
            if gradient is None
            else self._ring.place((self.ring_slot(slot), "sent", index), gradient)
            for index, gradient in enumerate(made)
        ]
        return places, transfers_between(places, made)

    def slot_of(self, microbatch: int) -> int:
        """The slot of a microbatch."""
        return self._slots[microbatch]

    def ring_slot(self, slot: int) -> int:
        """The ring slot of a slot."""
        return self._cells[slot][0]

    def is_recomputed(self, slot: int) -> bool:
        """Whether there is an R between F and backward."""
        return self._cells[slot][1] in INPUTS

    def trains(self, slot: int) -> list[Tensor]:
        """The leaves that collect gradients in a backward. Call this before the backward."""
        if self.is_recomputed(slot):
            return list(self._stage.recomputed.trains)
        own = {id(leaf) for leaf in self._leaves[slot]}
        return [leaf for leaf in leaves_of(self._stage.outputs[slot]) if id(leaf) not in own]

    def has(self, kind: Kind, slot: int) -> bool:
        """Whether an action has work to do, once earlier actions have run."""
        if kind is Kind.W:
            return self._stage.has_weights(slot)
        return kind in (Kind.F, Kind.R) or len(self._stage.outputs[slot]) > 0

    def run(self, kind: Kind, slot: int) -> list[Tensor]:
        """Runs an action; returns the tensors that other stages will read."""
        with provided(self.seeds[slot]):
            return self._run(kind, slot)

    def _run(self, kind: Kind, slot: int) -> list[Tensor]:
        if kind is Kind.F:
            return self._forward(slot)
        if kind is Kind.W:
            self._stage.weight_gradients(slot)
            return []
        if kind is Kind.R:
            self._stage.recompute(slot)
            return []
        if self._after is not None:
            self._stage.gradients[slot] = self.incoming[slot]
        if kind is Kind.B:
            self._stage.backward(slot)
        else:
            self._stage.input_gradients(slot)
        return [gradient for gradient in self.outgoing[slot] if gradient is not None]

    def _forward(self, slot: int) -> list[Tensor]:
        # F takes values out of the containers that it is given.
        self._stage.arguments[slot] = map_tensors(lambda place: place, self._arguments[slot])
        self._stage.leaves[slot] = self._leaves[slot]
        self._stage.forward(slot)
        if self._after is None:
            self.outputs[slot] = [self._losses.of(slot)]
        return self.outputs[slot]

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Notes the outputs for a later stage, in a form that can be copied."""
        del reader
        self.outputs[microbatch] = [as_bytes(output) for output in outputs]
        return self.outputs[microbatch]

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Notes the gradients for an earlier stage, in the same form."""
        del maker
        self.outgoing[microbatch] = [
            None if gradient is None else as_bytes(gradient) for gradient in gradients
        ]
        return self.outgoing[microbatch]

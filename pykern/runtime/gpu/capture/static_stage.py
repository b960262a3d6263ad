"""A stage at addresses that stay, to be captured: it has slots where others have microbatches."""

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
from ..rings import RingBuffers, as_bytes

# The slot of a microbatch, and what its F keeps.
CellKey = tuple[int, Level | None]


def distinct(cells: Sequence[CellKey]) -> list[CellKey]:
    """Each once, in their order."""
    return list(dict.fromkeys(cells))


class StaticStage(Transport):
    """The same layers as a stage has, run on the same few tensors again and again.

    F reads `inputs` of its slot and its results are `outputs`; B or I reads `incoming` and its
    results are `outgoing`. Whoever replays them fills the former and fetches the latter.

    Microbatches that have the same slot in turn share the tensors and graphs here if what F keeps
    of them is the same; otherwise the slot counts twice here, at the same place in the ring.

    Args:
        original: the stage.
        ring: where its tensors land.
        cells: by microbatch, its slot and its level.
        losses: of the last stage.

    Attributes:
        inputs: by slot, the tensors that an F reads.
        outputs: by slot, what it hands over.
        incoming: by slot, where the gradients of `outputs` that need one are put.
        outgoing: by slot, the gradients of `inputs`, None for those without.
        seeds: by slot, an int64 tensor of the seeds that its F and R draw.
    """

    def __init__(
        self,
        original: Stage,
        ring: RingBuffers,
        cells: Sequence[CellKey],
        losses: Losses | None,
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
        # Neighbours that only hold what is handed over.
        self._stage = original.twin()
        self._after = Stage(original.index + 1, ()) if original.next is not None else None
        self._before = Stage(original.index - 1, ()) if original.previous is not None else None
        self._stage.next, self._stage.previous = self._after, self._before
        self._stage.transport = self
        for stage in (self._stage, self._after, self._before):
            if stage is not None:
                levels = [level for _, level in self._cells]
                stage.begin(num_slots, StepSeed(), losses or _no_finish, levels)

    def take(self, slot: int, arguments: tuple[Any, ...], leaves: Sequence[Tensor]) -> None:
        """Makes room for such arguments, of which some tensors need gradients.

        Args:
            slot: whose.
            arguments: as the stage is called with.
            leaves: the tensors among them that get a gradient.
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
        """Makes room for such gradients of the outputs."""
        self.incoming[slot] = [
            None
            if gradient is None
            else self._ring.place((self.ring_slot(slot), Kind.B, index), gradient)
            for index, gradient in enumerate(gradients)
        ]

    def handed(self, slot: int) -> tuple[tuple[Any, ...], Sequence[Tensor]]:
        """What F has made for the next stage: its arguments, and which of them need gradients."""
        assert self._after is not None
        arguments = self._after.arguments[slot]
        assert arguments is not None
        return arguments, self._after.leaves[slot]

    def slot_of(self, microbatch: int) -> int:
        """Where the microbatch is."""
        return self._slots[microbatch]

    def ring_slot(self, slot: int) -> int:
        """Where that is in the ring."""
        return self._cells[slot][0]

    def is_recomputed(self, slot: int) -> bool:
        """Whether there is an R between F and backward."""
        return self._cells[slot][1] in INPUTS

    def trains(self, slot: int) -> list[Tensor]:
        """What collects gradients in a backward, before it."""
        if self.is_recomputed(slot):
            return list(self._stage.trains)
        own = {id(leaf) for leaf in self._leaves[slot]}
        return [leaf for leaf in leaves_of(self._stage.outputs[slot]) if id(leaf) not in own]

    def has(self, kind: Kind, slot: int) -> bool:
        """Whether there is anything to do for an action, after those before it."""
        if kind is Kind.W:
            return self._stage.has_weights(slot)
        return kind in (Kind.F, Kind.R) or len(self._stage.outputs[slot]) > 0

    def run(self, kind: Kind, slot: int) -> list[Tensor]:
        """Runs an action; returns what others will read of it."""
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
        self._stage.arguments[slot] = self._arguments[slot]
        self._stage.leaves[slot] = self._leaves[slot]
        for leaf in self._leaves[slot]:
            leaf.grad = None
        self._stage.forward(slot)
        if self._losses is not None:
            self.outputs[slot] = [self._losses.of(slot)]
        return self.outputs[slot]

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Notes what is handed over, each as it can be copied."""
        del reader
        self.outputs[microbatch] = [as_bytes(output) for output in outputs]
        return self.outputs[microbatch]

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Notes what is handed back, in the same way."""
        del maker
        self.outgoing[microbatch] = [
            None if gradient is None else as_bytes(gradient) for gradient in gradients
        ]
        return self.outgoing[microbatch]


def _no_finish(slot: int, output: Any, _: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    raise AssertionError(f"slot {slot} of a stage that is not the last has ended: {output}")

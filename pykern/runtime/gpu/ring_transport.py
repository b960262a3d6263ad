"""Copies tensors to stages on other GPUs, into their rings.

Tensors that a microbatch sends are kept until the copy is done. The plan's waits define that moment
(csrc/exec/stream_order.hpp), so no code here queries the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ... import _C
from ...plan import Kind
from ...tensors.strides import copy_of
from ...tensors.trees import map_tensors
from ..autograd.cut import copy_in_graph
from ..stage.transport import Transport
from .rings import P2PTransfer, RingBuffers, as_bytes

# Runs an action of a microbatch; returns what its copy moves.
StreamCallback = Callable[[int], Sequence[P2PTransfer] | None]
# By microbatch: transfers, and their source tensors.
Outbox = dict[int, tuple[list[P2PTransfer], list[Tensor]]]


class Way(NamedTuple):
    """The way of a stage's tensors into the ring of a stage on another lane.

    Attributes:
        ring: where tensors land.
        slots: the ring whose slots the places are numbered by.
        name: the beginning of all places.
        by_host: whether copies go through the host.
        outbox: of the stage after which a copy leaves the lane.
    """

    ring: RingBuffers
    slots: RingBuffers
    name: tuple[object, ...]
    by_host: bool
    outbox: Outbox


class RingTransport(Transport):
    """The transport of a stage on a GPU.

    Outputs for the next stage land in the slot that the microbatch has there. A farther stage has
    no slot for the microbatch yet, so it has a place for each slot of the sending stage: the
    microbatch has its sender's slot until all later stages have ended its B or I.

    Args:
        stage: the stage's number.
        rings: by stage of the replica.
        transports: by stage of the replica; the caller fills the list.
        lanes: knows which lanes reach each other's memory.

    Attributes:
        is_open: whether a step has begun that has not ended.
    """

    def __init__(
        self,
        stage: int,
        rings: Sequence[RingBuffers],
        transports: Sequence[RingTransport],
        lanes: _C.Lanes,
    ) -> None:
        self._stage = stage
        self._ring = rings[stage]
        self._rings = rings
        self._transports = transports
        self._lanes = lanes
        self.is_open = False
        self._keeps = False
        # By slot: the tensors being sent for its current or last microbatch.
        self._held: dict[int, list[Tensor]] = {}
        # Outputs and gradients. A stage's transfers are in the outbox of the stage after which a
        # copy leaves the lane.
        self._forth: Outbox = {}
        self._back: Outbox = {}
        # By the other stage: None for a stage on the same lane.
        self._ways: dict[int, Way | None] = {}

    @property
    def ring_bytes(self) -> int:
        """The bytes of the stage's own ring."""
        return self._ring.num_bytes

    def begin(self, program: _C.StreamProgram) -> None:
        """Starts a step of this program, without objects of the last step."""
        self.end()
        self._ring.slots = program.slots(self._stage)
        self._keeps = program.is_half or program.has(Kind.W)
        self.is_open = True

    def end(self) -> None:
        """Ends the step: work that is issued from now on runs after all copies."""
        self._held.clear()
        self._forth.clear()
        self._back.clear()
        if self._ring.outgrown:
            self._ring.end()
        self.is_open = False

    def close(self) -> None:
        """Frees the stage's ring."""
        self._ring.close()

    def sending(self, kind: Kind, call: Callable[[int], None]) -> StreamCallback:
        """The call of an action, which then returns the transfers of its copy.

        An action is issued after the copies that it waits for. An F has waited for all copies from
        its slot's last microbatch; a B or I has waited for the answer to the tensors that its F has
        sent. So the lane may reuse the memory of sent tensors.
        """
        if kind not in (Kind.F, Kind.B, Kind.I):
            return call
        held, ring, outbox = self._held, self._ring, self._outbox(kind)

        def act(microbatch: int) -> Sequence[P2PTransfer] | None:
            if held:
                held.pop(ring.slots[microbatch], None)
            call(microbatch)
            if microbatch not in outbox:
                return None
            transfers, held[ring.slots[microbatch]] = outbox.pop(microbatch)
            return transfers

        return act

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sends outputs into the ring of the later stage; returns the copies there."""
        way = self._way(reader)
        if way is None:
            return [self._own(output) for output in outputs]
        return [self._send(way, microbatch, output, i) for i, output in enumerate(outputs)]

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Sends gradients into the ring of the earlier stage; returns the copies there."""
        way = self._way(maker)
        if way is None:
            return gradients
        return [
            None if gradient is None else self._send(way, microbatch, gradient, index)
            for index, gradient in enumerate(gradients)
        ]

    def arrive(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Values in their own memory, if the ring's memory would be reused too early.

        The ring is reused too early if backwards are split, because a W may come later than the
        sender's, and if backwards run in another step.
        """
        if not self._keeps:
            return values
        return [self._own(value.detach()).requires_grad_(value.requires_grad) for value in values]

    def take_in(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients in their own memory, since a parameter or a hook may keep a gradient."""
        if self._ring.is_empty:
            return gradients
        return [None if gradient is None else self._own(gradient) for gradient in gradients]

    def keep(self, output: Any) -> Any:
        """The output in its own memory, since a layer may return its argument unchanged."""
        if self._ring.is_empty:
            return output

        def own(tensor: Tensor) -> Tensor:
            return copy_in_graph(tensor) if self._ring.owns(tensor) else tensor

        return own(output) if isinstance(output, Tensor) else map_tensors(own, output)

    def _own(self, tensor: Tensor) -> Tensor:
        return copy_of(tensor) if self._ring.owns(tensor) else tensor

    def _send(self, way: Way, microbatch: int, tensor: Tensor, index: int) -> Tensor:
        source = self._own(as_bytes(tensor))
        place = (*way.name, way.slots.slots[microbatch], index)
        spot = way.ring.spot(place, source, by_host=way.by_host)
        if spot.num_bytes > 0:
            transfers, sources = way.outbox.setdefault(microbatch, ([], []))
            transfers.append((spot.address, source.data_ptr(), spot.num_bytes, spot.via))
            sources.append(source)
        return spot.tensor.data

    def _outbox(self, kind: Kind) -> Outbox:
        """The outbox of a kind. I sends the same gradients as B."""
        return self._forth if kind is Kind.F else self._back

    def _way(self, other: int) -> Way | None:
        if other not in self._ways:
            self._ways[other] = self._way_to(other)
        return self._ways[other]

    def _way_to(self, other: int) -> Way | None:
        ring = self._rings[other]
        if ring.lane == self._ring.lane:
            return None
        kind = Kind.F if other > self._stage else Kind.B
        name: tuple[object, ...] = (kind.name,)
        slots = ring
        if abs(other - self._stage) > 1:
            name = (kind.name, self._stage)
            slots = self._ring if kind is Kind.F else ring
        carrier = carrier_of([ring.lane for ring in self._rings], self._stage, kind)
        by_host = not self._lanes.reaches(self._ring.lane, ring.lane)
        return Way(ring, slots, name, by_host, self._transports[carrier]._outbox(kind))


def carrier_of(lanes: Sequence[int], stage: int, way: Kind) -> int:
    """The stage whose copy takes the tensors of a stage off its lane.

    Args:
        lanes: by stage; a later, or for gradients an earlier, stage is on another lane.
        stage: the sender.
        way: F for outputs, B for gradients.
    """
    step = 1 if way is Kind.F else -1
    while lanes[stage + step] == lanes[stage]:
        stage += step
    return stage

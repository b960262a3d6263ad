"""How tensors get to a stage on another GPU: by copies into memory that is used again and again.

A stage has a ring of slots. A microbatch has one of them for as long as the stage works on it; what
comes for it lands there, and what it sends is kept until the copy is done. When that is, the plan's
waits say (csrc/exec/stream_program.hpp), so nothing here asks the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...plan import Action, Kind
from ...tensors.trees import map_tensors
from ..autograd.cut import copy_in_graph
from ..autograd.landing import copy_of, span
from ..stage.transport import Transport
from .cuda import Gpus

# To, from, bytes, and by way of which pinned memory, or 0.
P2PTransfer = tuple[int, int, int, int]


class RingBuffers:
    """Where tensors for one stage land. A place is a slot and which of its tensors it is."""

    def __init__(self, memory: Gpus, lane: int) -> None:
        self.lane = lane
        self._memory = memory
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._addresses: set[int] = set()

    def place(self, place: tuple[Any, ...], like: Tensor) -> Tensor:
        """A tensor of the same type, shape and strides there, of which nothing else knows."""
        storage = self._room(place, num_bytes_of(like), host=False).untyped_storage()
        landed = torch.empty(0, dtype=like.dtype, device=storage.device)
        return landed.set_(storage, 0, like.shape, like.stride())

    def host(self, place: tuple[Any, ...], num_bytes: int) -> int:
        """Address of as many bytes of the host, for what goes to that place."""
        return self._room((*place, "host"), num_bytes, host=True).data_ptr()

    def owns(self, tensor: Tensor) -> bool:
        """Whether it lies in the ring, and will be overwritten."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def end(self) -> None:
        """Lets go of what has been replaced, when nothing reads it any more.

        The step is issued, not done, and torch would give the memory to others at once: it knows
        nothing of the copies.
        """
        if self._outgrown:
            self._memory.synchronize()
            self._addresses -= {buffer.data_ptr() for buffer in self._outgrown}
            self._outgrown.clear()

    def close(self) -> None:
        """Gives all memory back: nothing reads it any more, and nothing lands here again."""
        self._buffers.clear()
        self._outgrown.clear()

    def _room(self, place: tuple[Any, ...], num_bytes: int, *, host: bool) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < num_bytes:
            if buffer is not None:
                self._outgrown.append(buffer)
            # At least one byte, for an address.
            size = max(num_bytes, 1)
            buffer = self._memory.pinned(size) if host else self._memory.on_lane(self.lane, size)
            self._buffers[place] = buffer
            self._addresses.add(buffer.data_ptr())
        return buffer


class RingTransport(Transport):
    """The way out of a stage on a GPU.

    What the next stage gets lands in the slot that the microbatch has there. A farther stage has no
    slot for it yet, so that lands in a place of its own for each slot of the stage that sends it:
    the microbatch has that one until everyone else is through with its B or I.

    Args:
        stage: the stage's number.
        rings: by stage of the replica.
        transports: by stage of the replica; filled by whoever makes them.
        lanes: tells which lanes reach each other's memory.
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
        self._lanes_of = [ring.lane for ring in rings]
        self._transports = transports
        self._lanes = lanes
        self._program: _C.StreamProgram | None = None
        self._keeps = False
        # By slot: what is being sent for the microbatch that has it, or had it last.
        self._held: dict[int, list[Tensor]] = {}
        # By whether F sends it or B and I, and by microbatch: transfers with what they read. What a
        # stage sends is in the outbox of the one behind which a copy leaves the lane.
        self._outbox: dict[tuple[Kind, int], list[tuple[P2PTransfer, Tensor]]] = {}

    def begin(self, program: _C.StreamProgram) -> None:
        """Starts a step of this program, with nothing of the last one."""
        self.end()
        self._program = program
        self._keeps = program.is_half or program.plan.has(Kind.W)

    def end(self) -> None:
        """Ends it: all copies are done before anything that is issued from now on."""
        self._program = None
        self._held.clear()
        self._outbox.clear()
        self._ring.end()

    def close(self) -> None:
        """Gives the stage's ring back."""
        self._ring.close()

    def start(self, kind: Kind, microbatch: int) -> None:
        """Begins an action, which is issued after the copies that it waits for.

        An F has waited for all that was sent from its slot before, a B or I for the answer to what
        its F has sent. So the memory of that may be used again by the lane.
        """
        if kind in (Kind.F, Kind.B, Kind.I):
            self._held.pop(self._slot(self._stage, microbatch), None)

    def take_transfers(self, kind: Kind, microbatch: int) -> list[P2PTransfer]:
        """What the action that just ended has to send."""
        sent = self._outbox.pop((_way_of(kind), microbatch), None)
        if sent is None:
            return []
        held = self._held.setdefault(self._slot(self._stage, microbatch), [])
        held += [source for _, source in sent]
        return [transfer for transfer, _ in sent]

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copies in the ring of the later stage."""
        ring = self._rings[reader]
        if ring.lane == self._ring.lane:
            return [self._own(output) for output in outputs]
        place: tuple[Any, ...] = (self._slot(reader, microbatch), Kind.F)
        if reader != self._stage + 1:
            place = (self._stage, self._slot(self._stage, microbatch), Kind.F)
        return [
            self._send(Kind.F, microbatch, output, ring, (*place, index))
            for index, output in enumerate(outputs)
        ]

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Copies in the ring of the earlier stage."""
        ring = self._rings[maker]
        if ring.lane == self._ring.lane:
            return gradients
        place: tuple[Any, ...] = (self._slot(maker, microbatch), Kind.B)
        if maker != self._stage - 1:
            place = (self._stage, *place)
        return [
            None
            if gradient is None
            else self._send(Kind.B, microbatch, gradient, ring, (*place, index))
            for index, gradient in enumerate(gradients)
        ]

    def arrive(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """In memory of their own where that of the ring is used again too early.

        So it is where backwards are split, for a W may be later than the sender's, and where
        backwards are another step.
        """
        if not self._keeps:
            return values
        return [self._own(value.detach()).requires_grad_(value.requires_grad) for value in values]

    def take_in(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """In memory of their own: a parameter may make a gradient its `.grad`, a hook keep it."""
        return [self._own(gradient) for gradient in gradients]

    def keep(self, output: Any) -> Any:
        """In memory of its own: a layer may have returned what it was given."""

        def own(tensor: Tensor) -> Tensor:
            return copy_in_graph(tensor) if self._ring.owns(tensor) else tensor

        return map_tensors(own, output)

    def _own(self, tensor: Tensor) -> Tensor:
        return copy_of(tensor) if self._ring.owns(tensor) else tensor

    def _send(
        self, way: Kind, microbatch: int, tensor: Tensor, ring: RingBuffers, place: tuple[Any, ...]
    ) -> Tensor:
        source = self._own(as_bytes(tensor))
        landing = ring.place(place, source)
        num_bytes = num_bytes_of(source)
        if num_bytes > 0:
            reached = self._lanes.reaches(self._ring.lane, ring.lane)
            via = 0 if reached else ring.host(place, num_bytes)
            transfer = (landing.data_ptr(), source.data_ptr(), num_bytes, via)
            carrier = self._transports[carrier_of(self._lanes_of, self._stage, way)]
            carrier._outbox.setdefault((way, microbatch), []).append((transfer, source))
        return landing

    def _slot(self, stage: int, microbatch: int) -> int:
        assert self._program is not None
        return self._program.slot_of(Action(Kind.F, stage, microbatch))


def _way_of(kind: Kind) -> Kind:
    """B for I as well, which sends what B would."""
    return Kind.B if kind is Kind.I else kind


def carrier_of(lanes: Sequence[int], stage: int, way: Kind) -> int:
    """The stage with whose copy something leaves the lane of a stage.

    Args:
        lanes: by stage; a later, or for gradients an earlier, stage is on another lane.
        stage: that sends it.
        way: F, or B for gradients.
    """
    step = 1 if way is Kind.F else -1
    while lanes[stage + step] == lanes[stage]:
        stage += step
    return stage


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as copies see it, in its own strides.

    Elements that lie on each other or apart are so where it lands, too: contiguous ones would be
    summed in another order there than in the model on one device.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"a stage hands over a tensor of layout {tensor.layout}; only dense tensors can be "
            "copied to another GPU"
        )
    return tensor.resolve_conj().resolve_neg()


def num_bytes_of(tensor: Tensor) -> int:
    """How many bytes of memory it covers, those between its elements included."""
    return span(tensor) * tensor.element_size()


def transfers_between(
    places: Sequence[Tensor | None], made: Sequence[Tensor | None]
) -> list[P2PTransfer]:
    """The transfers of what was made to its places, but for what is not there or empty."""
    return [
        transfer_to(place, tensor)
        for place, tensor in zip(places, made, strict=True)
        if place is not None and tensor is not None and tensor.numel() > 0
    ]


def transfer_to(place: Tensor, source: Tensor) -> P2PTransfer:
    """The transfer of a tensor to a place that its lane reaches."""
    return place.data_ptr(), source.data_ptr(), num_bytes_of(source), 0

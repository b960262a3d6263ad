"""Copies tensors to stages on other GPUs, into memory that is reused.

A stage has a ring of slots. A microbatch has a slot for as long as the stage works on it. Tensors
for the microbatch land in the slot, and tensors that it sends are kept until the copy is done. The
plan's waits define that moment (csrc/exec/stream_program.hpp), so no code here queries the GPU.
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

# Destination, source, number of bytes, and the pinned memory on the way, or 0.
P2PTransfer = tuple[int, int, int, int]


class RingBuffers:
    """The memory where tensors for one stage land. A place is a slot and a tensor's index."""

    def __init__(self, memory: Gpus, lane: int) -> None:
        self.lane = lane
        self._memory = memory
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._addresses: set[int] = set()

    def place(self, place: tuple[Any, ...], like: Tensor) -> Tensor:
        """A new tensor at the place, with the type, shape and strides of `like`."""
        storage = self._room(place, num_bytes_of(like), host=False).untyped_storage()
        landed = torch.empty(0, dtype=like.dtype, device=storage.device)
        return landed.set_(storage, 0, like.shape, like.stride())

    def host(self, place: tuple[Any, ...], num_bytes: int) -> int:
        """The address of pinned host memory for copies to the place."""
        return self._room((*place, "host"), num_bytes, host=True).data_ptr()

    @property
    def num_bytes(self) -> int:
        """The bytes on the lane, without those of the host."""
        return sum(b.nbytes for place, b in self._buffers.items() if place[-1] != "host")

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the ring, so that it will be overwritten."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def end(self) -> None:
        """Frees buffers that were replaced, once no kernel or copy reads them any more.

        The step is issued but not done, and torch does not know about the copies, so it would reuse
        the memory at once.
        """
        if self._outgrown:
            self._memory.synchronize()
            self._addresses -= {buffer.data_ptr() for buffer in self._outgrown}
            self._outgrown.clear()

    def close(self) -> None:
        """Frees all memory. No copy may read from the ring or write to it any more."""
        self._buffers.clear()
        self._outgrown.clear()

    def _room(self, place: tuple[Any, ...], num_bytes: int, *, host: bool) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < num_bytes:
            if buffer is not None:
                self._outgrown.append(buffer)
            # The buffer has at least one byte, so that it has an address.
            size = max(num_bytes, 1)
            buffer = self._memory.pinned(size) if host else self._memory.on_lane(self.lane, size)
            self._buffers[place] = buffer
            self._addresses.add(buffer.data_ptr())
        return buffer


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
        # By slot: the tensors being sent for its current or last microbatch.
        self._held: dict[int, list[Tensor]] = {}
        # By direction (F, or B for B and I) and microbatch: transfers with their source tensors. A
        # stage's transfers are in the outbox of the stage after which a copy leaves the lane.
        self._outbox: dict[tuple[Kind, int], list[tuple[P2PTransfer, Tensor]]] = {}

    @property
    def ring_bytes(self) -> int:
        """The bytes of the stage's own ring."""
        return self._ring.num_bytes

    def begin(self, program: _C.StreamProgram) -> None:
        """Starts a step of this program, without objects of the last step."""
        self.end()
        self._program = program
        self._keeps = program.is_half or program.plan.has(Kind.W)

    def end(self) -> None:
        """Ends the step: work that is issued from now on runs after all copies."""
        self._program = None
        self._held.clear()
        self._outbox.clear()
        self._ring.end()

    def close(self) -> None:
        """Frees the stage's ring."""
        self._ring.close()

    def start(self, kind: Kind, microbatch: int) -> None:
        """Begins an action, which is issued after the copies that it waits for.

        An F has waited for all copies from its slot's last microbatch; a B or I has waited for the
        answer to the tensors that its F has sent. So the lane may reuse the memory of sent tensors.
        """
        if kind in (Kind.F, Kind.B, Kind.I):
            self._held.pop(self._slot(self._stage, microbatch), None)

    def take_transfers(self, kind: Kind, microbatch: int) -> list[P2PTransfer]:
        """The transfers of the action that just ended."""
        sent = self._outbox.pop((_way_of(kind), microbatch), None)
        if sent is None:
            return []
        held = self._held.setdefault(self._slot(self._stage, microbatch), [])
        held += [source for _, source in sent]
        return [transfer for transfer, _ in sent]

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sends outputs into the ring of the later stage; returns the copies there."""
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
        """Sends gradients into the ring of the earlier stage; returns the copies there."""
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
        """Values in their own memory, if the ring's memory would be reused too early.

        The ring is reused too early if backwards are split, because a W may come later than the
        sender's, and if backwards run in another step.
        """
        if not self._keeps:
            return values
        return [self._own(value.detach()).requires_grad_(value.requires_grad) for value in values]

    def take_in(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients in their own memory, since a parameter or a hook may keep a gradient."""
        return [self._own(gradient) for gradient in gradients]

    def keep(self, output: Any) -> Any:
        """The output in its own memory, since a layer may return its argument unchanged."""

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
    """The direction of a kind: B also for I, which sends the same gradients."""
    return Kind.B if kind is Kind.I else kind


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


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor in a form that can be copied byte by byte, with its own strides.

    Overlaps and gaps between elements are kept at the destination: kernels may sum a contiguous
    tensor in another order than in the model on one device.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(
            "stages must hand over dense tensors, which alone can be copied to another GPU, got "
            f"layout {tensor.layout}"
        )
    return tensor.resolve_conj().resolve_neg()


def num_bytes_of(tensor: Tensor) -> int:
    """The number of bytes that a tensor covers, with the gaps between its elements."""
    return span(tensor) * tensor.element_size()


def transfers_between(
    places: Sequence[Tensor | None], made: Sequence[Tensor | None]
) -> list[P2PTransfer]:
    """The transfers of tensors to their places, without missing or empty ones."""
    return [
        transfer_to(place, tensor)
        for place, tensor in zip(places, made, strict=True)
        if place is not None and tensor is not None and tensor.numel() > 0
    ]


def transfer_to(place: Tensor, source: Tensor) -> P2PTransfer:
    """The transfer of a tensor to a place that its lane reaches."""
    return place.data_ptr(), source.data_ptr(), num_bytes_of(source), 0

"""Memory that is reused, where tensors from stages on other GPUs land.

A stage has a ring of slots. A microbatch has a slot for as long as the stage works on it, and
tensors for the microbatch land there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...tensors.strides import span
from .cuda import Gpus

# Destination, source, number of bytes, and the pinned memory on the way, or 0.
P2PTransfer = tuple[int, int, int, int]


class Spot(NamedTuple):
    """A place for tensors of one type, shape and strides.

    Attributes:
        tensor: at the place. `tensor.data` is another, whose version counts its own changes.
        address: of the place.
        num_bytes: that a tensor covers there.
        via: the address of pinned host memory for copies to the place, or 0.
    """

    tensor: Tensor
    address: int
    num_bytes: int
    via: int

    def fits(self, like: Tensor) -> bool:
        """Whether the place is for such tensors."""
        mine = self.tensor
        return (
            mine.shape == like.shape and mine.stride() == like.stride() and mine.dtype is like.dtype
        )


class RingBuffers:
    """The memory where tensors for one stage land. A place is a slot and a tensor's index.

    Attributes:
        lane: of the stage.
        slots: by microbatch, in the step that runs.
        outgrown: buffers that were replaced in the step, until `end`.
    """

    def __init__(self, memory: Gpus, lane: int) -> None:
        self.lane = lane
        self.slots: Sequence[int] = ()
        self._memory = memory
        self._spots: dict[tuple[Any, ...], Spot] = {}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self.outgrown: list[Tensor] = []
        self._addresses: set[int] = set()

    def place(self, place: tuple[Any, ...], like: Tensor) -> Tensor:
        """A new tensor at the place, with the type, shape and strides of `like`."""
        storage = self._room(place, num_bytes_of(like), host=False).untyped_storage()
        landed = torch.empty(0, dtype=like.dtype, device=storage.device)
        return landed.set_(storage, 0, like.shape, like.stride())

    def host(self, place: tuple[Any, ...], num_bytes: int) -> int:
        """The address of pinned host memory for copies to the place."""
        return self._room((*place, "host"), num_bytes, host=True).data_ptr()

    def spot(self, place: tuple[Any, ...], like: Tensor, *, by_host: bool) -> Spot:
        """The place for tensors like this one, which is made if the last one was not alike.

        Args:
            place: where.
            like: the tensor that comes.
            by_host: whether its copy goes through the host.
        """
        spot = self._spots.get(place)
        if spot is None or not spot.fits(like):
            # A step in inference mode may come before one that trains.
            with torch.inference_mode(False):
                tensor = self.place(place, like)
            num_bytes = num_bytes_of(like)
            via = self.host(place, num_bytes) if by_host else 0
            spot = self._spots[place] = Spot(tensor, tensor.data_ptr(), num_bytes, via)
        return spot

    @property
    def num_bytes(self) -> int:
        """The bytes on the lane, without those of the host."""
        return sum(b.nbytes for place, b in self._buffers.items() if place[-1] != "host")

    @property
    def is_empty(self) -> bool:
        """Whether nothing has landed yet, as in a pipeline of one lane."""
        return not self._addresses

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the ring, so that it will be overwritten."""
        return tensor.untyped_storage().data_ptr() in self._addresses

    def end(self) -> None:
        """Frees buffers that were replaced, once no kernel or copy reads them any more.

        The step is issued but not done, and torch does not know about the copies, so it would reuse
        the memory at once.
        """
        self._memory.synchronize()
        self._addresses -= {buffer.data_ptr() for buffer in self.outgrown}
        self.outgrown.clear()

    def close(self) -> None:
        """Frees all memory. No copy may read from the ring or write to it any more."""
        self._spots.clear()
        self._buffers.clear()
        self.outgrown.clear()

    def _room(self, place: tuple[Any, ...], num_bytes: int, *, host: bool) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < num_bytes:
            if buffer is not None:
                self.outgrown.append(buffer)
            # The buffer has at least one byte, so that it has an address.
            size = max(num_bytes, 1)
            buffer = self._memory.pinned(size) if host else self._memory.on_lane(self.lane, size)
            self._buffers[place] = buffer
            self._addresses.add(buffer.data_ptr())
        return buffer


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

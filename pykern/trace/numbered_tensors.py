"""The tensors of a forward that is being recorded, each with a number, and what has made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from .functions import RANDOM, name_of
from .origins import storages_of
from .tape import Instruction


class NumberedTensors:
    """Numbers of tensors. One that is written has a new number from then on.

    Attributes:
        aliases: by the number of a value that has been written, those that shared its memory.
    """

    def __init__(self) -> None:
        self.aliases: dict[int, set[int]] = {}
        # By the identity of a tensor: its number. All are kept, so that none takes another's.
        self._numbers: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}
        # Which instruction has made a value, and which values depend on inputs alone.
        self._maker: dict[int, Instruction] = {}
        self._early: set[int] = set()

    def give(self, tensor: Tensor) -> None:
        """Numbers an input of the forward."""
        self._early.add(self.number(tensor))

    def number(self, tensor: Tensor, *, new: bool = False) -> int:
        """The tensor's number; a new one for one that has been written."""
        number = self._numbers.get(id(tensor))
        if number is None or new:
            number = len(self._kept)
            self._numbers[id(tensor)] = number
            self._kept[number] = tensor
        return number

    def find(self, tensor: Tensor) -> int | None:
        """The tensor's number, if it has one."""
        return self._numbers.get(id(tensor))

    def overwrite(self, number: int, tensor: Tensor) -> None:
        """Notes that a numbered tensor has been written."""
        memory = _memory(tensor)
        self.aliases[number] = {
            alias
            for alias, other in self._kept.items()
            if memory is not None and other is not tensor and _memory(other) == memory
        }

    def within(self, buffers: Mapping[str, Tensor]) -> dict[int, str]:
        """The values in the memory of buffers, with the names of these."""
        names = {
            storage._cdata: name
            for name, buffer in buffers.items()
            for storage in storages_of(buffer)
        }
        if not names:
            return {}
        return {
            number: names[storage._cdata]
            for number, tensor in self._kept.items()
            for storage in storages_of(tensor)
            if storage._cdata in names
        }

    def note(self, instruction: Instruction, *, early: bool = True) -> None:
        """Notes what an instruction has made, and what does not depend on inputs alone any more.

        Args:
            instruction: the one behind all that are known.
            early: whether its results may depend on inputs alone.
        """
        random = torch.Tag.nondeterministic_seeded in getattr(instruction.target, "tags", ())
        drawing = name_of(instruction.target) in RANDOM or random
        early = early and instruction.anchor is None and not drawing
        memory = {
            other for number in instruction.overwritten for other in (number, *self.aliases[number])
        }
        # Values that are read again are computed again from the inputs, which that must not write.
        if memory - self._maker.keys():
            early = False
        if early and self.are_early(instruction.reads):
            self._early.update(instruction.makes)
        else:
            self._early.difference_update(instruction.makes)
        # Other names of the memory do not say that it was written.
        self._early -= memory - set(instruction.overwritten)
        for number in instruction.makes:
            self._maker.setdefault(number, instruction)

    def are_early(self, numbers: Iterable[int]) -> bool:
        """Whether values depend on inputs alone."""
        return self._early.issuperset(numbers)

    def look_at_shape(self, tensor: Tensor) -> None:
        """Notes that the forward's Python looks at the shape of a tensor."""
        number = self.find(tensor)
        if number is not None and number in self._maker:
            self._maker[number].shapes[number] = tensor.shape

    def makers_of(self, numbers: Iterable[int]) -> set[Instruction]:
        """The instructions that values come from."""
        makers: set[Instruction] = set()
        left = list(numbers)
        while left:
            maker = self._maker.get(left.pop())
            if maker is not None and maker not in makers:
                makers.add(maker)
                left += maker.reads
        return makers


def _memory(tensor: Tensor) -> int | None:
    """The address of a tensor's memory; of its storage if it has no memory, as fake tensors."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if storage.device.type == "meta" else storage.data_ptr()

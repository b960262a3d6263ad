"""A link of the chain: holds what pieces of all cut tapes call and read there, and runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import version_of
from .cut_tape import Environment, HereOf, Values
from .tape import Instruction
from .values import Held, Here, key_of

# The number of a segment's piece, what the segment holds, and the calls of its modules.
Runnable = tuple[int, HereOf, Mapping[str, Any]]


class Segment(nn.Module):
    """Modules and tensors of one piece of every cut tape. Forward runs the piece.

    Modules and parameters are those of the model, under their names with "/" for ".", because names
    of torch's modules have no dots.

    Attributes:
        index: the number of its piece.
        device: of its stage, None where that is where everything is.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.device: torch.device | None = None
        # Where parameters and buffers are at home: key, whether a parameter, module, name there.
        self._homes: list[tuple[str, bool, nn.Module, str]] = []
        # Where modules are: in which, under which name there, and in the model.
        self._places: list[tuple[nn.Module, str, str]] = []
        # By key of a buffer that is at home on another device: which it is, and how often it had
        # been written when the segment's copy was made.
        self._copied: dict[str, tuple[Tensor, int]] = {}

    def hold(self, instruction: Instruction, model: nn.Module) -> None:
        """Makes what an instruction calls and reads part of the segment."""
        target = instruction.target
        if isinstance(target, str) and key_of(target) not in self._modules:
            parent, _, name = target.rpartition(".")
            self._places.append((model.get_submodule(parent), name, target))
            self.add_module(key_of(target), model.get_submodule(target))
        self.hold_tensors(instruction.held, model)

    def hold_tensors(self, tensors: Iterable[Held], model: nn.Module) -> None:
        """Makes parameters and buffers of the model part of the segment."""
        for held in tensors:
            if held.key in self._parameters or held.key in self._buffers:
                continue
            owner_name, _, name = held.name.rpartition(".")
            owner = model.get_submodule(owner_name)
            self._homes.append((held.key, held.is_parameter, owner, name))
        self.refresh()

    def refresh(self) -> None:
        """Holds the parameters and buffers that are there now, whichever there were.

        Raises:
            RuntimeError: a module is another by now.
        """
        for parent, name, full_name in self._places:
            if parent._modules.get(name) is not self._modules[key_of(full_name)]:
                raise RuntimeError(
                    f"{full_name} was replaced or removed, but the stages hold the module that the "
                    "pipeline was made of. Make a new Pipeline"
                )
        for key, is_parameter, owner, name in self._homes:
            if is_parameter:
                self._parameters[key] = owner._parameters[name]
            else:
                self._buffers[key] = self._here(key, owner._buffers[name])

    def _here(self, key: str, buffer: Tensor | None) -> Tensor | None:
        """A buffer where the segment is; the copy of before if it is still like that."""
        if buffer is None or self.device is None or buffer.device == self.device:
            return buffer
        then, version = self._copied.get(key, (None, 0))
        is_same = then is buffer and version_of(buffer) == version
        # Tensors of inference mode do not count writes.
        if not is_same or buffer.is_inference() or self._buffers.get(key) is None:
            self._copied[key] = buffer, version_of(buffer)
            return buffer.to(self.device)
        return self._buffers[key]

    def part(self) -> Runnable:
        """The segment as a stage runs it."""
        return self.index, self._with, self._modules

    def _with(self, values: Values) -> Here:
        return Here(values, self._parameters, self._buffers, self.device)

    def forward(self, env: Environment) -> Any:
        """Runs the segment's piece of the cut tape that the values belong to."""
        piece = env.cut_tape.pieces[self.index]
        return piece(Environment(env.cut_tape, dict(env.values)), self._with, self._modules)

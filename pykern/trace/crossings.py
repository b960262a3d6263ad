"""Tensors that modules share outside arguments and results while a forward is recorded."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ..tensors.trees import tensors_of
from ..user_code import user_line
from .errors import UnseenTensor
from .left import Left
from .opened import can_open, is_compiled
from .origins import Follow, Origin, Origins, storages_of
from .tape import Crossing, Instruction
from .writes import Writes

# Neither a parameter nor a buffer, such as a tensor in an attribute.
_FOREIGN = "a tensor that it has not made"


class Crossings:
    """Follows the tensors of a forward, and finds those that modules get beside their arguments.

    Args:
        model: whose forward.
        opened: the modules that are looked into; what others do is theirs.
        inputs: the tensors among its arguments.
        origins: where it is noted what makes tensors.

    Attributes:
        follow: the mode in which the forward has to run.
        found: what passes between modules that stay whole.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[nn.Module],
        inputs: Collection[Tensor],
        origins: Origins,
    ) -> None:
        self._name_of = {module: name for name, module in model.named_modules()}
        self._origins = origins
        # The owner of what the forward itself makes.
        self._itself = object()
        origins.note(storages_of(inputs), Origin(self._itself, "an argument", True))
        self.follow = Follow(origins, self._see)
        self.follow.owner = self._itself
        self.follow.before_write = self._keep
        self._parameters = {
            storage._cdata for each in model.parameters() for storage in storages_of(each)
        }
        self._model = model
        # Written tensors, each with the number of the instruction that writes them.
        self._writes: list[tuple[int, Sequence[Tensor]]] = []
        self._data = [(each, each.data) for each in model.parameters()]
        # Parameters that have been written, as they were, and whether by the forward itself.
        self._before: dict[int, tuple[UntypedStorage, UntypedStorage, bool]] = {}
        self.found: list[Crossing] = []
        # By the owner of what they make: modules that stay whole, and numbers of instructions.
        self._calls: dict[Hashable, tuple[nn.Module, int]] = {}
        # The tensors of other modules that the current module reads.
        self._beside: list[tuple[int, Origin, str]] = []
        self._foreign: list[tuple[str, Tensor]] = []
        # Addresses of the memory that modules have returned.
        self._returned: set[int] = set()
        self._left = Left(model, opened)

    def watch(self, tensors: Iterable[Tensor]) -> Writes:
        """Watches tensors for writes from now on."""
        return Writes(tensors, self.follow.num_writes)

    def maker_of(self, tensor: Tensor) -> tuple[Origin | None, nn.Module | None]:
        """The origin of a tensor, None where it is the same for every microbatch; and its maker.

        That is the module that stays whole, where it is one.
        """
        origin = self._origins.of_tensor(tensor)
        if origin is None or not (origin.varies or tensor.requires_grad):
            return None, None
        return origin, self._calls.get(origin.owner, (None, 0))[0]

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is the same for every microbatch, and not a parameter."""
        if tensor.requires_grad:
            return False
        owned = any(storage._cdata in self._parameters for storage in storages_of(tensor))
        return not owned and self.maker_of(tensor) == (None, None)

    def before(self, module: nn.Module) -> None:
        """A module that stays whole is about to be called.

        Raises:
            CutError: the forward has set something that it can read.
        """
        self._left.before(module, self._name_of[module])

    @contextmanager
    def during(self, module: nn.Module, given: Any, number: int) -> Iterator[None]:
        """Around the call of a module by the instruction of a number, which gives it this."""
        follow, owner = self.follow, object()
        self._calls[owner] = module, number
        follow.owner, follow.has_read = owner, False
        follow.given = {storage._cdata for storage in storages_of(given)}
        compiles = is_compiled(module)
        follow.used = follow.given.copy() if compiles else set()
        with self._while_compiled() if compiles else nullcontext():
            try:
                yield
            finally:
                follow.owner, follow.given = self._itself, set()

    @contextmanager
    def _while_compiled(self) -> Iterator[None]:
        """Around the call of a compiled module: under the mode torch would not compile."""
        # Tensors of inference mode do not count writes: the mode has to see them.
        if torch.is_inference_mode_enabled():
            with torch.compiler.set_stance("force_eager"):
                yield
            return
        self.follow.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.follow.__enter__()  # type: ignore[no-untyped-call]

    def after(self, module: nn.Module, number: int, returned: Any) -> None:
        """The module has returned this.

        Raises:
            UnseenTensor: it has read what the forward around it knows and has not given it.
            CutError: it has left a number where the forward around it may read it.
        """
        name = self._name_of[module]
        self._left.after(module, name, has_read=self.follow.has_read)
        read, self._beside = self._beside, []
        for address, origin, where in read:
            maker, made_in = self._calls.get(origin.owner, (None, 0))
            if maker is module:
                continue
            what = f"{name} reads a tensor ({where}) that it is not given as an argument"
            if maker is None or (address in self._returned and can_open(module)):
                raise UnseenTensor(
                    f"{what}, and that the forward around it has made ({origin.where}): it would "
                    "be the sample's for ever; pass it as an argument, or keep both within one "
                    "module that stays whole (whole=[...])",
                    module,
                )
            text = f"{what}, and that {self._name_of[maker]} has made ({origin.where})"
            self.found.append(Crossing(made_in, number, text))
        self._returned.update(storage._cdata for storage in storages_of(returned))

    def written(self, number: int, tensors: Sequence[Tensor], values: Sequence[int | None]) -> None:
        """The instruction of a number writes these, of which some are values of the tape."""
        if tensors:
            self._writes.append((number, tensors))
            pairs = zip(tensors, values, strict=True)
            line = user_line()
            self._foreign += [(line, tensor) for tensor, value in pairs if value is None]

    def foreign(self) -> dict[str, Tensor]:
        """Tensors that the forward writes and has not made, but for parameters and buffers."""
        held = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        found: dict[str, Tensor] = {}
        for line, tensor in self._foreign:
            if id(tensor) not in held:
                again = f", {len(found)}" if f"{_FOREIGN} ({line})" in found else ""
                found[f"{_FOREIGN} ({line}{again})"] = tensor
        return found

    def all(self, instructions: Sequence[Instruction]) -> list[Crossing]:
        """Those that were found, and those of parameters and buffers that the forward writes."""
        found = list(self.found)
        for number, tensors in self._writes:
            addresses = {storage._cdata for storage in storages_of(tensors)}
            what = f"the forward ({instructions[number].where}) writes"
            for reader, instruction in enumerate(instructions):
                # Its own arguments have tensors that are not values of the tape, such as constants.
                others = [(_FOREIGN, one) for one in tensors_of(instruction.arguments)]
                for name, held in [*_held_by(instruction, self._model).items(), *others]:
                    if addresses.intersection(each._cdata for each in storages_of(held)):
                        text = f"{what} {name}, and {instruction.name} uses it"
                        found.append(Crossing(number, reader, text))
        return found

    def restore(self, settling: bool) -> None:
        """Gives parameters the memory that they had, and that what it held before.

        Args:
            settling: whether those that the forward itself has written stay as they are.
        """
        for storage, before, by_itself in self._before.values():
            if not (settling and by_itself):
                storage.copy_(before, non_blocking=False)
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data

    def _keep(self, storage: UntypedStorage) -> None:
        if storage._cdata in self._parameters and storage._cdata not in self._before:
            by_itself = self.follow.owner is self._itself
            self._before[storage._cdata] = storage, storage.clone(), by_itself

    def _see(self, storage: UntypedStorage, origin: Origin, where: str) -> None:
        if self.follow.owner is not self._itself:
            self._beside.append((storage._cdata, origin, where))


def _held_by(instruction: Instruction, model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that an instruction may use, by name in the model."""
    target = instruction.target
    if isinstance(target, str):
        module = model.get_submodule(target)
        return dict([*module.named_parameters(target), *module.named_buffers(target)])
    return {
        held.name: (model.get_parameter if held.is_parameter else model.get_buffer)(held.name)
        for held in instruction.held
    }

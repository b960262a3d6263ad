"""Records what the forward of a model does with tensors, by running it once.

The forward's own Python is run as it is: it is seen as calls of torch's functions and of modules.
Modules that need not be cut are not looked into. Decisions of the forward's Python are made
for good, so the values that it reads are noted, to be read again for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _C
from ..modes import as_before, set_function_modes
from ..tensors.trees import Call, flatten, leaves_of, map_tree, tensors_in
from ..torch_private import checkpoints_ended, function_modes, top_hooks
from ..user_code import user_line
from .call_modes import modes_now, modes_within
from .calls import kinds_of, told, told_to
from .crossings import Crossings
from .errors import CutError, UnseenTensor
from .foreign import Carriers, foreign_in, refuse_objects, with_carriers, without_objects
from .functions import METADATA, SHAPES, name_of, refuse_autograd, refuse_transforms
from .generators import Generators
from .gpus import gpu_of, on_gpu, shared_gpu
from .numbered_tensors import NumberedTensors
from .objects import HandedIn, Holdings
from .opened import refuse_nested
from .origins import Origins
from .tape import Instruction, Read, Tape, rest_of
from .values import Home, Ref, held_of

_T = TypeVar("_T")


class Recorder(TorchFunctionMode):
    """Runs a forward and makes a tape of it.

    Args:
        model: whose forward.
        opened: the modules that are looked into; any other that they call stays whole.
        home: the device that the model runs on.
        origins: where it is noted what the forward makes.
        generators: that it must not draw from itself.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[nn.Module],
        home: torch.device,
        origins: Origins,
        generators: Generators,
    ) -> None:
        super().__init__()
        self._generators = generators
        self._opened = set(opened)
        self._home = home
        self._origins = origins
        self._name_of = {module: name for name, module in model.named_modules()}
        self.kinds = kinds_of(self._name_of)
        self._held = held_of(model)
        self._instructions: list[Instruction] = []
        self._reads: list[Read] = []
        # Names of the buffers that the forward writes.
        self._written: set[str] = set()
        self._made = NumberedTensors()
        self._modes = modes_now()
        self._hooks = top_hooks()

    def record(
        self, model: nn.Module, inputs: list[Tensor], call: Call, *, settling: bool = False
    ) -> Tape:
        """The tape of a call.

        Args:
            model: whose forward.
            inputs: the tensors among its arguments, which have the first numbers.
            call: its arguments.
            settling: whether parameters keep what the forward itself writes.
        """
        args, kwargs = call
        for tensor in inputs:
            self._made.give(tensor)
        trained = frozenset(number for number, x in enumerate(inputs) if x.requires_grad)
        self._crossings = Crossings(model, self._opened, inputs, self._origins)
        self._carriers = Carriers(model, call, self._crossings, self._made)
        with (
            _C.Undo(self._crossings.restore, settling),
            as_before(),
            told(self),
            checkpoints_ended(),
        ):
            self.__enter__()  # type: ignore[no-untyped-call]
            self._crossings.follow.__enter__()  # type: ignore[no-untyped-call]
            output = model.forward(*args, **kwargs)
            self._generators.require_same("its end")
        for read in self._reads:
            read.require_constant(self._written)
        buffers = dict(model.named_buffers()).items()
        written = {f"the buffer {name}": one for name, one in buffers if name in self._written}
        return Tape(
            self._instructions,
            map_tree(self._output, output),
            self._reads,
            self._made.aliases,
            trained,
            self._crossings.all(self._instructions),
            self._made.within(written | self._crossings.foreign()),
            with_gradients=torch.is_grad_enabled(),
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "_set_grad_enabled":
            return func(*args, **kwargs)
        refuse_autograd(func, name)
        given = tensors_in((args, kwargs))
        writes = self._crossings.watch(given)
        gpu = shared_gpu(given, self._held)
        returned = func(*on_gpu(gpu, args), **on_gpu(gpu, kwargs))
        written = writes.found()
        if written or tensors_in(returned):
            if name == "requires_grad_" and not written:
                return returned
            self._record(func, args, kwargs, returned, written)
        elif name in METADATA or getattr(func, "__name__", "") == "__get__":
            if name in SHAPES or isinstance(returned, torch.Size):
                for tensor in given:
                    self._made.look_at_shape(tensor)
        else:
            self._read(func, args, kwargs, returned, given)
        return returned

    def call_module(self, module: nn.Module, call: Callable[..., _T], args: Any, kwargs: Any) -> _T:
        """Calls a module of the model, which stays whole unless it is opened."""
        name = self._name_of.get(module)
        if name is None or module in self._opened or isinstance(module, nn.ModuleList):
            refuse_nested(module, name, args, kwargs)
            return call(module, *args, **kwargs)
        refuse_transforms(name)
        self._refuse_checkpoint(name)
        objects = Holdings(foreign_in((args, kwargs)))
        writes = self._crossings.watch([*tensors_in((args, kwargs)), *objects.tensors])
        number = len(self._instructions)
        self._crossings.before(module)
        with self._away(), self._crossings.during(module, (args, kwargs, objects.tensors), number):
            gpu = gpu_of(module)
            returned = call(module, *on_gpu(gpu, args), **on_gpu(gpu, kwargs))
        self._crossings.after(module, number, returned)
        written, after = writes.found(), Holdings(objects.roots)
        with self._away():
            touched = [*tensors_in(returned), *written]
            carried = self._carriers.carried(objects, after, name, touched, self._stand_in)
        if carried is not None:
            args, kwargs = with_carriers((args, kwargs), objects)
        self._record(name, args, kwargs, returned, written, carried)
        if carried is not None:
            self._instructions += self._carriers.left(objects, after)
        return returned

    def _record(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        returned: Any,
        written: list[Tensor],
        carried: HandedIn | None = None,
    ) -> None:
        self._generators.require_same()
        arguments = map_tree(self._argument, args), map_tree(self._argument, kwargs)
        before = [self._made.find(tensor) for tensor in written]
        self._crossings.written(len(self._instructions), written, before)
        self._written |= {
            held.name for tensor in written if (held := self._held.get(id(tensor))) is not None
        }
        is_one = isinstance(returned, Tensor)
        leaves = [returned] if is_one else flatten(returned)[0]
        results = [
            self._made.number(leaf, new=any(leaf is one for one in written))
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
        for number, tensor in zip(before, written, strict=True):
            if number is not None:
                self._made.overwrite(number, tensor)
        after = [
            (number, self._made.number(tensor, new=True))
            for number, tensor in zip(before, written, strict=True)
            if number is not None and not any(tensor is leaf for leaf in tensors_in(returned))
        ]
        instruction = Instruction(
            target,
            arguments,
            results,
            after,
            modes_within(self._modes),
            user_line(),
            None if is_one else rest_of(leaves),
            [number for number in before if number is not None],
            carried=carried,
        )
        self._instructions.append(instruction)
        self._made.note(instruction)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._stand_in(leaf)
        return Home(leaf) if isinstance(leaf, torch.device) and leaf == self._home else leaf

    def _output(self, leaf: Any) -> Any:
        return self._stand_in(leaf) if isinstance(leaf, Tensor) else without_objects(leaf)

    def _stand_in(self, tensor: Tensor) -> Any:
        number = self._made.find(tensor)
        if number is not None:
            return Ref(number)
        if id(tensor) in self._held:
            return self._held[id(tensor)]
        origin, maker = self._crossings.maker_of(tensor)
        if tensor.requires_grad or origin is not None:
            made = "" if origin is None else f" ({origin.where})"
            raise UnseenTensor(
                f"{user_line()} uses a tensor of shape {tuple(tensor.shape)} that has been made "
                "where it is not seen, such as within a module that stays whole and keeps it as "
                f"an attribute{made}. Return it from that module",
                maker,
            )
        return tensor

    def _read(self, func: Any, args: Any, kwargs: Any, returned: Any, given: list[Tensor]) -> None:
        if not given:
            return
        arguments = map_tree(self._argument, args), map_tree(self._argument, kwargs)
        wanted = [number for tensor in given if (number := self._made.find(tensor)) is not None]
        if not self._made.are_early(wanted):
            raise CutError(
                f"{user_line()} reads the values of a tensor ({name_of(func)}) that the model has "
                "computed, to go on in Python. Do it within a module that stays whole, or with "
                "torch's functions"
            )
        makers = self._made.makers_of(wanted)
        steps = [instruction for instruction in self._instructions if instruction in makers]
        self._reads.append(Read(func, arguments, returned, steps, user_line()))

    def _refuse_checkpoint(self, name: str) -> None:
        if top_hooks() != self._hooks:
            raise CutError(
                f"{name} is called within torch.utils.checkpoint or hooks for saved tensors "
                f"({user_line()}), which cutting the forward there would lose. Use "
                "Pipeline(recompute='layer'), or checkpoint within the layer"
            )

    def call_function(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Applies an autograd function, which stays whole."""
        bound = apply.__get__(None, kind)
        if any(callable(leaf) and not isinstance(leaf, type) for leaf in leaves_of((args, kwargs))):
            raise CutError(
                f"{kind.__name__} is given a function ({user_line()}), whose modules would not be "
                "seen. If it checkpoints, use Pipeline(recompute='layer')"
            )
        objects = Holdings(foreign_in((args, kwargs)))
        gpu = shared_gpu(tensors_in((args, kwargs)), self._held)
        with self._away():
            returned = bound(*on_gpu(gpu, args), **on_gpu(gpu, kwargs))
        refuse_objects(objects, kind.__name__)
        self._record(bound, args, kwargs, returned, [])
        return returned

    def _away(self) -> AbstractContextManager[object]:
        """A context, within which what stays whole runs as it would without a recorder."""
        self._generators.require_same()
        modes = function_modes()
        others = [mode for mode in modes if mode is not self]

        def leave() -> None:
            told_to(None)
            set_function_modes(others)

        def come_back(_: object) -> None:
            set_function_modes(modes)
            told_to(self)
            self._generators.look()

        return _C.Within(leave, come_back)

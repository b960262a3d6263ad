"""Memory that torch's operations read, write and allocate, for the fake driver's model."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda.fake import Range

# They point a tensor at memory, such as a slot of another device, and touch none of it.
POINTS = torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.detach.default


class Memory(Protocol):
    """The object that is told of memory."""

    def add(self, storage: Any, stream: int, gpu: int | None = None) -> None:
        """Memory of a stream, which an action on that GPU has made where one is named."""

    def meet(self, storage: Any) -> None:
        """Memory that has come from elsewhere."""


class Watch(TorchDispatchMode):
    """Notes the memory that operations touch."""

    def __init__(self, memory: Memory, stream: int, gpu: int | None = None) -> None:
        super().__init__()
        self._gpu = gpu
        self.touched: dict[Range, bool] = {}
        self._memory = memory
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in POINTS:
            return result
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in _tensors((args, kwargs)):
            self._touch(tensor, written=False)
        if not func.is_view:
            for tensor in _tensors((result, written)):
                self._memory.add(tensor.untyped_storage(), self._stream, self._gpu)
                self._touch(tensor, written=True)
        return result

    def _touch(self, tensor: Tensor, *, written: bool) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not tensor.is_meta:
            self._memory.meet(storage)
            place = storage.data_ptr(), storage.nbytes()
            self.touched[place] = self.touched.get(place, False) or written


class Unexecuted(Watch):
    """Notes what operations touch, and undoes what they do to memory that was there before."""

    def __init__(self, memory: Memory, stream: int) -> None:
        super().__init__(memory, stream)
        self._fresh: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = set()
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            known.add(address)
            if address not in self._fresh and address not in self._before:
                self._before[address] = storage, storage.clone()
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in known and address not in self._before:
                self._fresh.add(address)
                self._kept.append(storage)
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            changed = not torch.equal(_bytes_of(storage), _bytes_of(before))
            self.touched[storage.data_ptr(), storage.nbytes()] = changed
            if changed:
                storage.copy_(before)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensors(tree: Any) -> list[Tensor]:
    """Those among arguments or results of an operation, which have no other containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]

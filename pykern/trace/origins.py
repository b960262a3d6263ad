"""The origins of tensors, which show the tensors that calls share outside their arguments."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..forks import fork_safe_lock
from ..tensors.trees import leaves
from ..torch_private import DispatchMode, call_in_mode, is_traceable_wrapper_subclass
from ..user_code import user_line
from .values import PLAIN

# How deep objects are looked into of which torch knows nothing.
_DEPTH = 3
# The operations by which Python gets a number, of which some are made of others, and come so in
# inference mode; and those that do not read the tensor they write.
_TO_PYTHON = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.item,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.allclose,
}
_OVERWRITES = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_}
# So many may be known before those of memory that has gone are forgotten.
_MANY = 10_000


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where the memory of a tensor was made, or written last.

    Attributes:
        owner: the call or stage that was running.
        where: the line of the model's code.
        varies: whether the values depend on a microbatch or on random numbers. Others, such as
            those of a cache of positions, are the same whenever they are made.
    """

    owner: Hashable
    where: str
    varies: bool


class Origins:
    """The origins of memory, which several threads may note.

    The memory of a tensor counts, not the tensor: views and detached tensors share it.
    """

    def __init__(self) -> None:
        # By address: whose that was, which is gone when the address is another's, and its origin.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Origin]] = {}
        self._limit = _MANY
        self._lock = fork_safe_lock()

    def note(self, storages: Iterable[torch.UntypedStorage], origin: Origin) -> None:
        """Some memory has been made or written there."""
        with self._lock:
            for storage in storages:
                self._known[storage._cdata] = weakref.ref(storage), origin
            if len(self._known) > self._limit:
                self._known = {at: one for at, one in self._known.items() if one[0]() is not None}
                self._limit = 2 * len(self._known) + _MANY

    def without(self, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
        """A context that begins with no origin for the memory of some tensors, and keeps none.

        Parameters and buffers are there before a recording, whoever has written them, and are put
        back behind it.
        """
        addresses = [storage._cdata for storage in storages_of(tensors)]
        with self._lock:
            before = {at: self._known[at] for at in addresses if at in self._known}

        def forget(then: Mapping[int, Any]) -> None:
            with self._lock:
                for address in addresses:
                    self._known.pop(address, None)
                self._known.update(then)

        forget({})
        return _C.Undo(forget, before)

    def of(self, storage: torch.UntypedStorage) -> Origin | None:
        """The origin of some memory; None where it was there before, or was made unseen."""
        known, origin = self._known.get(storage._cdata, (None, None))
        return origin if known is not None and known() is storage else None

    def of_tensor(self, tensor: Tensor) -> Origin | None:
        """The origin of a tensor's memory."""
        return next((self.of(storage) for storage in storages_of(tensor)), None)


# Gets the memory that an operation reads, its origin, and the line.
Look = Callable[[torch.UntypedStorage, Origin, str], None]


class Follow(DispatchMode):
    """Notes what the operations of this thread make, and shows what they are given of others'.

    Args:
        origins: where it is noted.
        look: called for what another owner has made and the running one has not been given, where
            it varies or has a graph.

    Attributes:
        owner: whichever call or stage is running.
        given: addresses of the memory that the owner has been given.
        used: those of them that it has read.
        has_read: whether Python has got a number that varies.
        num_writes: by address of memory, how many operations have written it.
        before_write: called with memory that an operation is about to write.
    """

    def __init__(self, origins: Origins, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner: Hashable = None
        self.given: set[int] = set()
        self.used: set[int] = set()
        self.has_read = False
        self.num_writes = Counter[int]()
        self.before_write: Callable[[torch.UntypedStorage], None] = lambda _: None
        self._origins = origins
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        varies = torch.Tag.nondeterministic_seeded in func.tags
        read: set[int] = set()
        for tensor, storage in _with_storages((args, kwargs)):
            read.add(storage._cdata)
            if tensor is not args[0] or func.overloadpacket not in _OVERWRITES:
                varies = self._read(tensor, storage) or varies
        self.has_read = self.has_read or (varies and func.overloadpacket in _TO_PYTHON)
        written = list(_written(func, args, kwargs)) if func._schema.is_mutable else []
        for storage in written:
            self.num_writes[storage._cdata] += 1
            self.before_write(storage)
        result = call_in_mode(func, args, kwargs)
        made = [storage for _, storage in _with_storages(result) if storage._cdata not in read]
        if varies:
            made += [storage for storage in written if storage._cdata not in self.given]
        if made and not _is_autocasts(func, args):
            self._origins.note(made, Origin(self.owner, user_line(), varies))
        return result

    def _read(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Shows the tensor if it is another's; returns whether its values vary."""
        if storage._cdata in self.given:
            self.used.add(storage._cdata)
            return True
        origin = self._origins.of(storage)
        if origin is None:
            return False
        if origin.owner != self.owner and (origin.varies or tensor.requires_grad):
            self._look(storage, origin, user_line())
        return origin.varies


class FollowAgain(Follow):
    """Follows a backward, and notes what it makes with gradients on: there it does an F again.

    All that is read counts: checkpointing stops at the last tensor that it needs, so that its last
    operation is never done again, and what that would have read is first read by its gradient.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs) if func._schema.is_mutable else ()
        # Sums of gradients are read to be written.
        self._writes = {storage._cdata for storage in written}
        if torch.is_grad_enabled():
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Gradients of batch norms are given running statistics, and do not look at them.
        if "batch_norm" not in func._schema.name:
            for tensor, storage in _with_storages((args, kwargs)):
                self._read(tensor, storage)
        return call_in_mode(func, args, kwargs)

    def _read(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        return storage._cdata not in self._writes and super()._read(tensor, storage)


def _is_autocasts(func: Any, args: Any) -> bool:
    """Whether it casts a parameter as autocast does, which keeps the result for later calls."""
    if func is not torch.ops.aten._to_copy.default or not isinstance(args[0], torch.nn.Parameter):
        return False
    # Within an operation that casts, autocast says that it is off.
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def storages_of(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of the tensors in a tree, in what objects hold as well."""
    return (storage for _, storage in _with_storages(tree, _DEPTH))


def _with_storages(tree: Any, depth: int = 0) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.layout is torch.strided and not is_traceable_wrapper_subclass(leaf):
                yield leaf, leaf.untyped_storage()
        elif depth and not isinstance(leaf, (*PLAIN, type, torch.nn.Module)) and not callable(leaf):
            yield from _with_storages(list(getattr(leaf, "__dict__", {}).values()), depth - 1)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.UntypedStorage]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (storage for _, storage in _with_storages(value))

"""The contents of modules' attributes, to be put back after a run that has written there."""

from __future__ import annotations

import sys
import threading
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..tensors.sparse import are_equal
from ..torch_private import version_of
from .code_names import is_foreign
from .values import PLAIN

# How many objects lie between a module and what is copied.
_DEPTH = 4
# Nothing in larger dicts and lists, such as vocabularies, is looked at.
_MOST = 1000
# How many entries are looked at below one attribute.
_MOST_BELOW = 10_000
# The bytes of tensors and arrays that are copied below one attribute: more are data, not state.
_MOST_BYTES = 2**26
# An attribute of parameters that belongs to the backward, not to a forward.
_GRADIENT = "main_grad"
_PLAIN = frozenset(PLAIN)
# Modules of these are pykern's machinery, and know what has run.
_MACHINERY = ("pykern.pipeline.", "pykern.trace.")
# Classes of Python's whose objects are for anything.
_SPACES = (types.SimpleNamespace, threading.local, UserDict, UserList)

# Functions of the bases of containers, as classes of their own may override them.
_MAPPINGS = (OrderedDict, dict)
_WRITES: Mapping[type, Callable[[Any, Sequence[Any]], object]] = {
    list: lambda held, entries: list.__setitem__(held, slice(None), entries),
    set: lambda held, entries: (set.clear(held), set.update(held, entries)),
    deque: lambda held, entries: (deque.clear(held), deque.extend(held, entries)),
}
_KINDS = (*_MAPPINGS, *_WRITES, tuple, frozenset)


def holders_of(modules: Iterable[nn.Module]) -> list[nn.Module | nn.Parameter]:
    """Modules, and parameters with attributes: a forward may change the attributes of both.

    The first forward of a quantised layer may take its scales from the attributes of a parameter.
    Pipelines and the like within a model are not among them.
    """
    modules = list(modules)
    users = [module for module in modules if not _is_machinery(module)]
    return [*users, *(each for each in parameters_in(modules) if vars(each))]


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules themselves, each once."""
    found = (each for module in modules for each in module.parameters(recurse=False))
    return list(dict.fromkeys(found))


def _is_machinery(module: nn.Module) -> bool:
    return any(f"{kind.__module__}.".startswith(_MACHINERY) for kind in type(module).__mro__)


class HeldContents:
    """The attributes of modules and parameters, and what is in these, as it is now.

    In attributes are dicts, lists, sets and the like, tensors, arrays and objects of the user's
    classes, each looked into. The gradients of tensors count, but not those of parameters.

    Args:
        holders: the modules, and the parameters with attributes.
        tensors: whose values count as well, however large they are.
        parameters: whose values and memory count, too; they are copied to the host's memory.
    """

    def __init__(
        self,
        holders: Iterable[nn.Module | nn.Parameter],
        tensors: Iterable[Tensor] = (),
        parameters: Iterable[nn.Parameter] = (),
    ) -> None:
        holders = list(holders)
        # By identity, and kept alive, so that no other object takes the identity.
        self._seen: dict[int, object] = {id(holder): holder for holder in holders}
        self._ways: list[Callable[[], object]] = []
        for tensor in tensors:
            if id(tensor) not in self._seen:
                self._seen[id(tensor)] = tensor
                self._keep_tensor(tensor)
        for parameter in parameters:
            self._keep_parameter(parameter)
        for holder in holders:
            for value in self._keep_attributes(vars(holder)):
                if type(value) not in _PLAIN:
                    self._keep(value)

    def put_back(self) -> None:
        """Restores everything; may be called again after an interrupt."""
        for way in self._ways:
            way()

    def _keep(self, attribute: object) -> None:
        """Copies an attribute and what is in it, level by level."""
        entries, self._bytes = _MOST_BELOW, _MOST_BYTES
        level: Iterable[object] = [attribute]
        for depth in range(_DEPTH):
            below: list[object] = []
            for thing in level:
                # An attribute is copied itself however large it is.
                most = min(_MOST, entries)
                inner = self._copy(thing, most if depth else sys.maxsize)
                if len(inner) <= most:
                    entries -= len(inner)
                    below += inner
            if not below:
                return
            level = below

    def _copy(self, thing: Any, most: int) -> Sequence[object]:
        """Copies one thing if it can be written; returns what is in it."""
        if type(thing) in _PLAIN or id(thing) in self._seen:
            return ()
        self._seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            # Others are parameters, or may be without values. No write takes an expanded one.
            if type(thing) is Tensor and thing.layout == torch.strided and 0 not in thing.stride():
                self._keep_small(thing)
            return ()
        kind = next((kind for kind in _KINDS if isinstance(thing, kind)), None)
        if kind is not None:
            return self._keep_container(thing, kind) if len(thing) <= most else ()
        return self._copy_object(thing)

    def _copy_object(self, thing: Any) -> Sequence[object]:
        numpy = sys.modules.get("numpy")
        if isinstance(thing, bytearray):
            self._keep_small(thing)
            return ()
        if numpy is not None and type(thing) is numpy.ndarray:
            if thing.flags.writeable:
                self._keep_small(thing)
            return ()
        attributes = getattr(thing, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(thing, type | types.ModuleType):
            return ()
        if isinstance(thing, nn.Module):
            return () if _is_machinery(thing) else self._keep_attributes(attributes)
        if is_foreign(type(thing)) and not isinstance(thing, _SPACES):
            return ()
        return self._keep_attributes(attributes)

    def _keep_attributes(self, attributes: dict[str, Any]) -> Sequence[object]:
        before = {name: value for name, value in attributes.items() if name != _GRADIENT}
        self._ways.append(partial(_put_attributes, attributes, before))
        return tuple(before.values())

    def _keep_container(self, thing: Any, kind: type[Any]) -> Sequence[object]:
        before = _entries(kind, thing)
        if kind in _MAPPINGS or kind in _WRITES:
            self._ways.append(partial(_put_entries, thing, kind, before))
        return before

    def _keep_small(self, values: Any) -> None:
        """Copies a tensor, an array or bytes if these are small."""
        size = len(values) if isinstance(values, bytearray) else values.nbytes
        if size > self._bytes:
            return
        self._bytes -= size
        if isinstance(values, Tensor):
            self._keep_tensor(values)
        elif isinstance(values, bytearray):
            self._ways.append(partial(bytearray.__setitem__, values, slice(None), bytes(values)))
        else:
            self._ways.append(partial(_put_array, values, values.copy()))

    def _keep_tensor(self, tensor: Tensor) -> None:
        value, version = tensor.detach().clone(), version_of(tensor)
        self._ways.append(partial(_put_tensor, tensor, value, version))
        if tensor.requires_grad and tensor.is_leaf:
            gradient = tensor.grad
            sums = None if gradient is None else gradient.detach().clone()
            self._ways.append(partial(_put_gradient, tensor, gradient, sums))

    def _keep_parameter(self, parameter: nn.Parameter) -> None:
        if is_lazy(parameter):
            return
        held = parameter.data
        # Tensors of other classes, such as quantised weights, are not written by layers.
        is_plain = type(held) is Tensor and held.layout == torch.strided and not held.is_meta
        if is_plain and 0 not in held.stride():
            before = held.to("cpu", copy=True)
            self._ways.append(partial(_put_parameter, parameter, held, before))


def _put_attributes(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    # One by one: another thread may read them.
    for name in attributes.keys() - before.keys() - {_GRADIENT}:
        del attributes[name]
    for name, value in before.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _entries(kind: type[Any], thing: Any) -> list[Any]:
    """The entries of a container; keys and values of a dict in turn."""
    return list(
        chain.from_iterable(kind.items(thing)) if kind in _MAPPINGS else kind.__iter__(thing)
    )


def _put_entries(thing: Any, kind: type[Any], before: Sequence[Any]) -> None:
    now = _entries(kind, thing)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    if kind not in _MAPPINGS:
        _WRITES[kind](thing, before)
        return
    # The order of keys can be told.
    kind.clear(thing)
    for key, value in zip(before[::2], before[1::2], strict=True):
        kind.__setitem__(thing, key, value)


def _put_array(array: Any, before: Any) -> None:
    if array.shape == before.shape:
        array[...] = before


def _put_tensor(tensor: Tensor, before: Tensor, version: int | None) -> None:
    # Memory that nothing has written may be such that nothing can, as that of a file. On a GPU
    # the comparison would wait.
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu"
    if is_plain and version_of(tensor) == version and are_equal(tensor, before):
        return
    # By `.data`, beside any graph, in one mode or another. It counts no write either: the value
    # is what it was, and a buffer that nothing else has written must not look written.
    tensor.data.copy_(before)


def _put_gradient(tensor: Tensor, gradient: Tensor | None, before: Tensor | None) -> None:
    # A backward may have added to the gradient in place.
    if gradient is not None and before is not None:
        gradient.data.copy_(before)
    tensor.grad = gradient


def _put_parameter(parameter: nn.Parameter, held: Tensor, before: Tensor) -> None:
    # A forward may have written the memory, or have given the parameter other memory.
    parameter.data = held
    if held.device.type != "cpu" or not torch.equal(held, before):
        held.copy_(before)

"""A description of a function, which is equal in processes that have the same function."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from .agreement import digest_of


def likeness(function: object) -> str:
    """Its name, with a digest of its code, or of its settings where it is a module.

    Values that a function has enclosed, and tensors, may well be each process's own: these are not
    compared.
    """
    texts = list(_texts(function))
    return f"{texts[0]} ({digest_of(texts)})"


def _texts(function: Any) -> Iterator[str]:
    if isinstance(function, partial):
        yield from _texts(function.func)
        given = [*enumerate(function.args), *sorted(function.keywords.items())]
        yield from (f"{name}={value!r}" for name, value in given if _is_plain(value))
    elif isinstance(function, MethodType):
        yield from _texts(function.__func__)
        yield from _texts_of_object(function.__self__)
    elif isinstance(function, FunctionType):
        yield f"{function.__module__}.{function.__qualname__}"
        yield from _texts_of_code(function.__code__)
        yield from (repr(value) for value in function.__defaults__ or () if _is_plain(value))
    else:
        yield from _texts_of_object(function)


def _texts_of_object(thing: object) -> Iterator[str]:
    kind = type(thing)
    named = getattr(thing, "__qualname__", None)
    yield _name_of(thing if named is not None else kind)
    for module in thing.modules() if isinstance(thing, nn.Module) else ():
        yield _name_of(type(module))
        yield module.extra_repr()
        if type(module).__module__.startswith("torch."):
            # A loss of torch's does not show its weights and rates.
            settings = sorted(vars(module).items())
            yield from (f"{name}={value!r}" for name, value in settings if _is_plain(value))
    call = getattr(kind, "forward" if isinstance(thing, nn.Module) else "__call__", None)
    if isinstance(call, FunctionType):
        yield from _texts_of_code(call.__code__)


def _texts_of_code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join((*code.co_names, *code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _texts_of_code(constant)
        elif _is_plain(constant):
            yield repr(constant)


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', type(thing))}"


def _is_plain(value: object) -> bool:
    """Whether equal values have equal texts in all processes, without addresses or set order."""
    return value is None or isinstance(value, str | bytes | int | float | complex)

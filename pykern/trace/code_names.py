"""Names in the code of a module's forward, and of the functions that this leads to."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

# Objects of these are not those of a model.
_FOREIGN = sys.stdlib_module_names | {"torch", "pykern", "numpy"}


def functions_of(module: nn.Module) -> list[types.FunctionType]:
    """The forward of a module, and the functions of its class and file that this leads to.

    Functions that decorators have wrapped are among them.
    """
    methods = {
        name: value for kind in reversed(type(module).__mro__) for name, value in vars(kind).items()
    }
    found: dict[types.FunctionType, None] = {}
    todo: list[Any] = [methods.get("forward"), vars(module).get("forward")]
    while todo:
        for function in _plain(todo.pop()):
            if function in found or is_foreign(function):
                continue
            found[function] = None
            todo += [content_of(cell) for cell in function.__closure__ or ()]
            todo.append(vars(function).get("__wrapped__"))
            code = function.__code__
            for place in (vars(module), methods):
                todo += [place[name] for name in attribute_names(code) if name in place]
            if function.__module__ == type(module).__module__:
                place = function.__globals__
                todo += [place[name] for name in global_names(code) if name in place]
    return list(found)


def _plain(thing: Any) -> Iterator[types.FunctionType]:
    """The function of Python in a thing, if any."""
    if isinstance(thing, property):
        thing = thing.fget
    while isinstance(thing, partial):
        thing = thing.func
    if isinstance(thing, types.MethodType | staticmethod | classmethod):
        thing = thing.__func__
    if isinstance(thing, types.FunctionType):
        yield thing


def content_of(cell: types.CellType) -> Any:
    """The value that a variable of a function around has now; None before it has any."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_foreign(thing: Any) -> bool:
    """Whether a class, a function or a file is one of Python's, torch's, numpy's or pykern's."""
    place = "__name__" if isinstance(thing, types.ModuleType) else "__module__"
    return (getattr(thing, place, None) or "").partition(".")[0] in _FOREIGN


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of all functions in it: also those of expressions are such."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes_in(part)


def attribute_names(code: types.CodeType) -> set[str]:
    """The names and texts in a function's code, by which it may read attributes and keys."""
    found: set[str] = set()
    for part in codes_in(code):
        found.update(part.co_names)
        constants = list(part.co_consts)
        while constants:
            constant = constants.pop()
            if isinstance(constant, str):
                found.add(constant)
            elif isinstance(constant, tuple | frozenset):
                constants += constant
    return found


def global_names(code: types.CodeType) -> set[str]:
    """The names of globals that a function's code reads."""
    steps = (step for part in codes_in(code) for step in dis.get_instructions(part))
    return {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}

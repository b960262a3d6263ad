"""Pipelines are designed by `design`, or within a block by a function that changes requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .build import Design, design
from .request import Request

# Makes the design of a request.
Designer = Callable[[Request], Design]

_in_force: list[Designer] = [design]


def design_of(asked: Request) -> Design:
    """The design of a request, by the designer in force.

    Raises:
        TypeError, ValueError, CutError, PlanError: as `design`.
    """
    return _in_force[-1](asked)


@contextmanager
def designing(designer: Designer) -> Iterator[None]:
    """Within it, a designer makes the designs of all pipelines of the process, in every thread.

    A rehearsal designs pipelines for CPU workers where GPUs are asked for, and adds a feature that
    looks at their steps.
    """
    _in_force.append(designer)
    try:
        yield
    finally:
        _in_force.remove(designer)

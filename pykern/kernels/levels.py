"""Recompute levels of kernels: which tensors the operations save for their backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Literal, get_args

from .. import _C

# none: saves all tensors that the backward reads. ops: saves only tensors that the backward cannot
# recompute inside its kernels. ops+stash: as ops, but with inputs of gated activations in 8 bits,
# which changes their gradients.
KernelLevel = Literal["none", "ops", "ops+stash"]
LEVELS: tuple[KernelLevel, ...] = get_args(KernelLevel)

_level: ContextVar[KernelLevel] = ContextVar("level", default="ops")


def level() -> KernelLevel:
    """The level of operations called now; "ops" by default."""
    return _level.get()


def keeping(wanted: KernelLevel) -> AbstractContextManager[object]:
    """A context in which operations save tensors according to the level.

    Raises:
        ValueError: the level is unknown.
    """
    if wanted not in LEVELS:
        raise ValueError(f"the level of kernels must be one of {', '.join(LEVELS)}, got {wanted!r}")
    before = _level.get()
    return _C.Within(partial(_level.set, wanted), lambda _: _level.set(before))

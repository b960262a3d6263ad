"""How much the operations here keep for their backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Literal, get_args

from .. import _C

# none: everything that the backward reads. ops: what it cannot make again within its own kernels.
# ops+stash: as ops, and the inputs of gated activations in 8 bits, which changes their gradients.
KernelLevel = Literal["none", "ops", "ops+stash"]
LEVELS: tuple[KernelLevel, ...] = get_args(KernelLevel)

_level: ContextVar[KernelLevel] = ContextVar("level", default="ops")


def level() -> KernelLevel:
    """The level of operations called now: "ops" where nothing else has been asked for."""
    return _level.get()


def keeping(wanted: KernelLevel) -> AbstractContextManager[object]:
    """A context, within which operations keep as much as the level says.

    Raises:
        ValueError: there is no such level.
    """
    if wanted not in LEVELS:
        raise ValueError(f"a level of kernels is one of {', '.join(LEVELS)}, got {wanted!r}")
    before = _level.get()
    return _C.Within(partial(_level.set, wanted), lambda _: _level.set(before))

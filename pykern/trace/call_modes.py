"""The modes of torch that a forward sets around some of its calls."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from .. import _C
from ..torch_private import SharedSettings, set_shared_settings, shared_settings

# Whether gradients are on; autocast: the device type, and its type or None where it is off; and
# settings of all threads, None where they are those around the whole forward.
Modes = tuple[bool, tuple[tuple[str, torch.dtype | None], ...], SharedSettings | None]


def modes_now() -> Modes:
    """The modes of this thread."""
    cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    cuda = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return torch.is_grad_enabled(), (("cpu", cpu), ("cuda", cuda)), shared_settings()


def modes_within(around: Modes) -> Modes | None:
    """The modes of this thread in a forward; None for those around it."""
    now = modes_now()
    if now == around:
        return None
    grad, autocast, shared = now
    return grad, autocast, None if shared == around[2] else shared


def under(modes: Modes) -> ExitStack:
    """A context with these modes."""
    grad, autocast, shared = modes
    stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(grad))
    for kind, dtype in autocast:
        if dtype is not None or torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
    if shared is not None:
        stack.enter_context(_C.Undo(set_shared_settings, shared_settings()))
        set_shared_settings(shared)
    return stack

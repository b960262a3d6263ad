"""Modes for operations, and how these are called within one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The keys by which torch comes to modes, which it includes while there are any.
_KEYS_OF_MODES: list[Any] = [
    torch._C._parse_dispatch_key(key) for key in ("Python", "PythonTLSSnapshot")
]


_KEYS_OF_AUTOCAST = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)


class DispatchMode(TorchDispatchMode):
    """A mode for operations, under which torch does not load its compiler.

    Loading takes a second in the first operation, which may run on a worker. An interrupt would
    leave the compiler half imported.

    In inference mode torch gives modes composite operations, such as linear, as a whole. Modes that
    tell operations apart return what `in_parts` does, where it takes an operation apart.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def in_parts(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Calls the operation as its parts, which come to the mode as outside of inference mode.

        Returns:
            The result; NotImplemented where the operation is not composite, or a class of tensors
            may have its own way to do it.
        """
        if types or not _is_composite(func):
            return NotImplemented
        # As without a mode, parts of what autocast casts itself are not cast again.
        cast = [key for key in _KEYS_OF_AUTOCAST if func.has_kernel_for_dispatch_key(key)]
        with ExitStack() as stack:
            stack.enter_context(torch._C._RestorePythonTLSSnapshot())  # type: ignore[attr-defined]
            for key in cast:
                keys = torch._C.DispatchKeySet(key)
                stack.enter_context(torch._C._ExcludeDispatchKeyGuard(keys))
            stack.enter_context(self)
            return func.decompose(*args, **(kwargs or {}))


def _is_composite(func: Any) -> bool:
    """Whether a mode has been given a composite operation, as modes are in inference mode."""
    return torch.is_inference_mode_enabled() and (
        func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        # Such a kernel is around this call, and makes its result a view.
        and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.ADInplaceOrView)
    )


def call_in_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation that a dispatch mode has been given, as it runs without the mode.

    In inference mode, modes are given composite operations, such as dropout or einsum. For what
    these call, torch would leave out autocast and the interceptors of random draws.
    """
    if not _is_composite(func):
        return func(*args, **kwargs)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if torch._C._len_torch_dispatch_stack() == 0:
            for key in _KEYS_OF_MODES:
                torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        return func(*args, **kwargs)

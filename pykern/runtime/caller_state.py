"""Carries torch's thread-local state from the caller of a step to the workers that run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch

from ..modes import AUTOCAST_DEVICES
from ..torch_private import (
    dispatch_modes,
    function_modes,
    hooks_refused,
    interceptor,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_grad,
    set_interceptor,
    top_hooks,
)

# The dtypes of autocast on a thread that has set no others.
_USUAL_DTYPES = (torch.bfloat16, torch.float16)


class CallerState:
    """A snapshot of the calling thread. A worker calls it to apply the state; returns the undo.

    The snapshot has grad mode, inference mode, autocast, the top pair of saved-tensor hooks, and
    function and dispatch modes (`torch.device` as a context is one). Autocast has a dtype where it
    is off as well, which the autocasts of layers take over. The snapshot also has the interceptor
    of random draws of a stage around the call. The C++ executor carries contextvars. torch's
    intra-op threads are divided among the workers; each worker gets at least one.

    Attributes:
        has_grad_alone: whether the thread has nothing of all that but its grad mode.
    """

    def __init__(self, num_workers: int) -> None:
        """Takes the snapshot of the calling thread, for `num_workers` workers."""
        self._callers_threads = torch.get_num_threads()
        self.num_threads = max(1, self._callers_threads // num_workers)
        self.changed_threads = False
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
            for device in AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]
        self.autocast_dtypes = _autocast_dtypes()
        self.saved_tensors_hooks = top_hooks()
        self.saved_tensors_disabled = hooks_refused()
        self.function_modes = function_modes()
        self.dispatch_modes = dispatch_modes()
        self.interceptor = interceptor()
        # Most steps have nothing else to carry.
        self.has_grad_alone = self.saved_tensors_disabled is None and not (
            self.inference
            or self.autocast
            or self.autocast_dtypes != _USUAL_DTYPES
            or self.saved_tensors_hooks
            or self.function_modes
            or self.dispatch_modes
            or self.interceptor
        )

    def __call__(self) -> Callable[[], None]:
        """Applies the state to the calling worker."""
        if torch.get_num_threads() != self.num_threads:
            self.changed_threads = True
            torch.set_num_threads(self.num_threads)
        grad = torch.is_grad_enabled()
        set_grad(self.grad)
        if self.has_grad_alone:
            return partial(set_grad, grad)
        with ExitStack() as stack:
            stack.callback(set_grad, grad)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.callback(_set_autocast_dtypes, _autocast_dtypes())
            _set_autocast_dtypes(self.autocast_dtypes)
            for device, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
            if self.saved_tensors_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensors_hooks)
                stack.enter_context(hooks)
            if self.saved_tensors_disabled is not None:
                message = self.saved_tensors_disabled
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(message))
            # Modes are pushed without entering them, which would change the caller's own mode.
            for mode in self.function_modes:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for mode in self.dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            if self.interceptor is not None:
                set_interceptor(self.interceptor)
                stack.callback(set_interceptor, None)
            undo = stack.pop_all()
        return undo.close

    def restore_threads(self) -> None:
        """Restores the number of threads; called by the caller when workers have undone the state.

        A worker that takes its share of threads also changes a setting that MKL keeps per process.
        """
        if self.changed_threads:
            torch.set_num_threads(self._callers_threads)


def _autocast_dtypes() -> tuple[torch.dtype, ...]:
    return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")


def _set_autocast_dtypes(dtypes: tuple[torch.dtype, ...]) -> None:
    for device, dtype in zip(AUTOCAST_DEVICES, dtypes, strict=True):
        torch.set_autocast_dtype(device, dtype)

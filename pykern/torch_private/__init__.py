"""The private interfaces of torch that pykern uses, so that another torch fails here first.

`pykern.interop` has its own list of interfaces of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from traceback import walk_tb
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dispatch import DispatchMode, call_in_mode
from .intercepting import (
    Interceptor,
    Operation,
    interceptor,
    set_interceptor,
    takes_generator,
    watch_draws,
)
from .shared_settings import (
    SharedSettings,
    changed_settings,
    set_shared_settings,
    shared_settings,
)

__all__ = [
    "HOOKS",
    "NODES_LAST",
    "WHOLE",
    "DispatchMode",
    "Interceptor",
    "Operation",
    "SharedSettings",
    "call_in_mode",
    "changed_settings",
    "checked_backward",
    "checkpoints_ended",
    "compiler",
    "dispatch_modes",
    "function_modes",
    "has_live_graph",
    "holders_at",
    "hooks_refused",
    "interceptor",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "multithreading",
    "num_holders",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_hooks",
    "push_dispatch_mode",
    "push_function_mode",
    "push_hooks",
    "release_pool",
    "run_backward",
    "set_compiler",
    "set_grad",
    "set_interceptor",
    "set_multithreading",
    "set_shared_settings",
    "shared_settings",
    "storage_of",
    "stream_setter",
    "takes_generator",
    "top_hooks",
    "transform",
    "version_of",
    "watch_draws",
    "without_transforms",
]

Hooks = tuple[Callable[..., Any], Callable[..., Any]]

# The attributes in which a module has its hooks.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Whether the node of a custom function can be held without holding the graph that leads to it.
NODES_LAST = torch.__version__ >= "2.13"

# Arguments of `run_backward` besides outputs and gradients: do not keep the graph; make no graph of
# the backward; no inputs, so all leaves; outputs may reach no leaf; add gradients to `.grad`.
WHOLE = (False, False, (), True, True)


def checked_backward(
    outputs: Any,  # tensors, or edges of the graph
    gradients: Sequence[Tensor],
    keep_graph: bool,
    create_graph: bool,
    inputs: tuple[Tensor, ...],
    *_: bool,
) -> None:
    """Runs a backward as `run_backward`, with torch's checks of gradients in Python."""
    torch.autograd.backward(
        outputs, gradients, keep_graph, create_graph, inputs=inputs if inputs else None
    )


def _engine() -> Callable[..., object]:
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    run: Callable[..., object] = getattr(engine, "run_backward", checked_backward)
    return run


# `torch.autograd.backward` without its checks in Python, for gradients that have the shapes and
# types of their outputs: `run_backward(outputs, gradients, *WHOLE)`, with two tuples.
run_backward = _engine()


def version_of(tensor: Tensor) -> int:
    """The number of writes to the tensor; 0 for tensors of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def function_modes() -> list[Any]:
    """The function modes in force on this thread, the innermost last."""
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)] if count else []


def dispatch_modes() -> list[Any]:
    """The dispatch modes in force on this thread, the innermost last."""
    count = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(place) for place in range(count)] if count else []


def top_hooks() -> Hooks | None:
    """The saved-tensors hooks in effect on this thread, None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def pop_hooks() -> None:
    """Takes the top pair of saved-tensors hooks away."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    """Puts a pair of saved-tensors hooks on top."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


# The reason why saved-tensors hooks are refused on this thread; None if they are allowed.
hooks_refused: Callable[[], str | None]
hooks_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
# Whether a backward of this thread may run on threads of autograd's own.
multithreading: Callable[[], bool] = torch._C._is_multithreading_enabled
set_multithreading: Callable[[bool], None] = torch._C._set_multithreading_enabled
# Sets whether operations of this thread are recorded.
set_grad: Callable[[bool], None] = torch._C._set_grad_enabled

# torch's compiler of the Python code that this thread runs; None without one.
compiler: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
# Sets the compiler of this thread.
set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def transform(tensors: Iterable[Tensor]) -> str | None:
    """The name of a transform of torch that is in force for operations on these tensors, if any."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    if forward_ad._current_level < 0:
        return None
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        return "forward-mode differentiation"
    return None


# A context without the transforms of torch.func that are in force.
without_transforms: Callable[[], AbstractContextManager[object]] = torch._C._DisableFuncTorch


def is_transformed() -> bool:
    """Whether this thread is within a transform of torch.func, such as `torch.vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_live_graph(leaf: Tensor) -> bool:
    """Whether a graph of autograd that reaches the leaf is still held."""

    def noted() -> dict[str, Any]:
        # The leaf's node lives as long as a graph holds it, and its metadata live with the node.
        node = leaf.expand_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        return cast(dict[str, Any], node.metadata)  # type: ignore[union-attr]

    with torch.enable_grad():
        noted()["pykern"] = True
        return bool(noted().pop("pykern", False))


# The address of a tensor's storage, and the number of holders of the storage at an address, which
# must be alive: `num_holders` less one, in less time. It makes no object of Python for the storage.
storage_of: Callable[[Tensor], int] = getattr(torch._C, "_storage_address")  # noqa: B009 - no stub
holders_at: Callable[[int], int] = torch._C._storage_Use_Count


def num_holders(tensor: Tensor) -> int:
    """The number of holders of a tensor's storage, with the object of Python for the storage."""
    return holders_at(tensor.untyped_storage()._cdata)


def stream_setter(stream: torch.cuda.Stream) -> Callable[[], None]:
    """A function that makes the stream current on its GPU, and that GPU the current one.

    `torch.cuda.set_stream` calls the same, by two functions of Python.
    """
    return partial(
        torch._C._cuda_setStream,
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def release_pool(gpu: int, pool: Any) -> None:
    """Restores torch's allocator after a capture that torch could not end.

    A torch that has restored it itself refuses both calls (pytorch #180395).
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(gpu, pool)
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(gpu, pool)


@contextmanager
def checkpoints_ended() -> Iterator[None]:
    """Removes saved-tensors hooks of torch.utils.checkpoint if an exception leaves the context.

    Before torch 2.13 these hooks stay until the exception is freed, and disturb later operations.
    """
    try:
        yield
    except BaseException as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                generator = frame.f_locals.get("gen")
                if generator is not None:
                    generator.close()
        raise

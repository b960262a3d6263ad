"""Interrupts at every line that pykern runs, as if a signal handler raised them there."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pykern

_TORCH = Path(torch.__file__).parent
# pykern's own files, and those that its contexts are made of.
_TRACED = (
    str(Path(pykern.__file__).parent),
    contextlib.__file__,
    shutil.__file__,
    *(
        str(_TORCH / name)
        for name in (
            "overrides.py",
            "random.py",
            "autograd/grad_mode.py",
            "utils/_contextlib.py",
            "utils/_python_dispatch.py",
        )
    ),
)


@functools.cache
def _safe_offsets(code: CodeType) -> frozenset[int]:
    """The offsets of lines before which Python does not handle signals.

    Python handles signals after calls. A line that leaves a `with` follows the last instruction of
    the block, and Python would already have handled a signal within the block.
    """
    found = list(dis.get_instructions(code))
    safe = set()
    for at, instruction in enumerate(found):
        # SWAPs first put aside the value of a `return` within the block: one, in Python 3.14 two.
        leaves = itertools.dropwhile(lambda one: one.opname == "SWAP", found[at:])
        first = itertools.islice(leaves, 3)
        leaving = [one.opname == "LOAD_CONST" and one.argval is None for one in first]
        names = [one.opname for one in found[at : at + 2]]
        failing = names == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]
        # A `try` is nothing but a line, which the `with` around it does not even cover. An
        # exception raised where a handler ends leaves the thread within the handler for ever after.
        if leaving == [True] * 3 or failing or instruction.opname in {"NOP", "POP_EXCEPT"}:
            safe.add(instruction.offset)
    return frozenset(safe)


class Interrupt:
    """Raises KeyboardInterrupt, once, at the n-th line that this thread comes to within it.

    Args:
        number: which line, from 0; None raises nothing, and counts.
        how: what raises.

    Attributes:
        count: how many lines there were.
        where: the line at which it was raised; empty if it was not.
    """

    def __init__(self, number: int | None, how: Callable[[], None] | None = None) -> None:
        self._number = number
        self._how = how
        self.count = 0
        self.where = ""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        self._handled = sys.exception()
        sys.settrace(self.trace)
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        sys.settrace(self._before)
        if error is None:
            assert sys.exception() is self._handled, self.where

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """The trace function, called for each call and line."""
        if not frame.f_code.co_filename.startswith(_TRACED):
            return None
        if event == "line" and frame.f_lasti not in _safe_offsets(frame.f_code):
            number, self.count = self.count, self.count + 1
            if number == self._number:
                name = Path(frame.f_code.co_filename).name
                self.where = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                if self._how is None:
                    raise KeyboardInterrupt
                self._how()
        return self.trace


def modes() -> tuple[object, ...]:
    """The state of a thread besides its variables, which interrupts must leave unchanged."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch._C._is_multithreading_enabled(),
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch.nn.Module.__call__,
        torch.autograd.Function.__dict__["apply"],
    )


@contextlib.contextmanager
def _without_gc_callbacks() -> Iterator[None]:
    """Python ignores, and reports, an interrupt that comes to a worker in a callback of its GC.

    Hypothesis has such a callback; programs seldom have one.
    """
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        yield
    finally:
        gc.callbacks[:] = kept


def at_every_line(
    prepare: Callable[[], Callable[[], object]], check: Callable[[str], None], stride: int = 1
) -> int:
    """Interrupts something at every line in turn, or at every so many-th; returns how often.

    Args:
        prepare: gives what is interrupted, anew for each time.
        check: gets the line of the interrupt; looks at what it has left. The interrupt with its
            traceback is still there, as it is in `sys.last_value` after an uncaught one.
        stride: how many lines lie between two interrupts.
    """
    times = 0
    while True:
        act = prepare()
        before = modes()
        held: BaseException | None = None
        with _without_gc_callbacks(), Interrupt(times * stride) as interrupt:
            try:
                act()
            except KeyboardInterrupt as error:
                held = error
        if not interrupt.where:
            return times
        assert held is not None, f"the interrupt was lost: {interrupt.where}"
        assert modes() == before, interrupt.where
        check(interrupt.where)
        del held
        times += 1

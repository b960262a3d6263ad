"""Launches of compiled kernels, without what Triton's JIT does anew for each launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from torch import Tensor

from .rounding import INTERPRETED
from .triton_private import constants, device_and_stream, is_special, is_watched, launch

# The most compiled forms to keep for a kernel. Numbers count by their values, which may be many.
_MOST_FORMS = 1024


class Launched:
    """A kernel, with the compiled form for each kind of arguments that it was launched with.

    `kernel[grid](*arguments, **constants)` takes constants and options by name, all else by
    position. A kind is finer than what the JIT specialises a kernel for: dtypes and alignments of
    tensors, numbers, constants, options, and the device. The JIT itself launches the first of a
    kind; and all kernels while a profiler has hooks around launches.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._constants = constants(kernel)
        self._is_special = is_special(kernel)
        self._forms: dict[Hashable, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: Sequence[int]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *arguments: Any, **named: Any) -> None:
        if is_watched(self.kernel):
            self.kernel[grid](*arguments, **named)
            return
        device, stream = device_and_stream()
        kind = (
            device,
            # A number 1 and a number 1.0 have different kinds.
            *map(type, arguments),
            *[
                (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x
                for x in compress(arguments, self._is_special)
            ],
            *named.items(),
        )
        form = self._forms.get(kind)
        if form is None:
            self._launch_first(kind, grid, arguments, named)
        else:
            compiled, last = form
            launch(compiled, grid, stream, (*arguments, *last))

    def _launch_first(
        self, kind: Hashable, grid: Sequence[int], arguments: Sequence[Any], named: dict[str, Any]
    ) -> None:
        if len(arguments) != len(self._is_special):
            raise TypeError(
                f"arguments of {self.kernel} must go by position, {len(self._is_special)} beside "
                f"constants, got {len(arguments)}"
            )
        compiled = self.kernel[grid](*arguments, **named)
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        # A hook of the JIT may have refused to compile.
        if compiled is not None:
            self._forms[kind] = compiled, [named[name] for name in self._constants]


def launched(kernel: Any) -> Any:
    """Decorates a kernel that is launched with a grid. The interpreter launches kernels itself."""
    return kernel if INTERPRETED else Launched(kernel)

"""The private interfaces of Triton that pykern uses, each behind one name.

They may change in any version of Triton. `tests/kernels/test_launching.py` calls each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from triton import knobs
from triton.runtime import driver


def device_and_stream() -> tuple[int, int]:
    """The current device, and the handle of its current stream."""
    active = driver.active
    device: int = active.get_current_device()
    return device, active.get_current_stream(device)


def constants(kernel: Any) -> list[str]:
    """The names of the parameters whose arguments are constants, which must be the last ones."""
    found = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    if found != kernel.arg_names[len(kernel.arg_names) - len(found) :]:
        raise ValueError(f"constants must be the last parameters of {kernel}, got {found}")
    return found


def is_special(kernel: Any) -> list[bool]:
    """Whether the compiled kernel depends on the argument, for each parameter but constants."""
    return [
        not (parameter.do_not_specialize and parameter.annotation_type)
        for parameter in kernel.params
        if not parameter.is_constexpr
    ]


def is_watched(kernel: Any) -> bool:
    """Whether launches call hooks, or kernels are now compiled in another way than usual."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def launch(compiled: Any, grid: Sequence[int], stream: int, arguments: Iterable[Any]) -> None:
    """Launches a compiled kernel that is not watched."""
    x, y, z = (*grid, 1, 1)[:3]
    # Between metadata and arguments are what hooks would be told, and the two hooks.
    compiled.run(
        x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
    )

"""A driver and a compiler for Triton without a GPU, which note what kernels are launched with.

They are for a process of their own, where Triton is not interpreted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

STREAM = 77


@dataclass(frozen=True)
class Launch:
    """The arguments that a launcher gets.

    Attributes:
        place: the grid, the stream, the function and its metadata.
        hooks: what hooks are told, and the two hooks.
        arguments: of the kernel, constants among them.
    """

    place: tuple[Any, ...]
    hooks: tuple[Any, ...]
    arguments: tuple[Any, ...]

    def equals(self, other: Launch) -> bool:
        """Whether the other runs the same code on the same objects."""
        pairs = zip(self.arguments, other.arguments, strict=True)
        return self.place == other.place and all(a is b or a == b for a, b in pairs)


class StandIn:
    """The driver of a GPU that is not there, of which the current device may be set."""

    def __init__(self) -> None:
        self.device = 0
        self.launches: list[Launch] = []
        self._functions = itertools.count(1)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, next(self._functions), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448, "warpSize": 32},
            unload_module=lambda _: None,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def launcher_cls(self, *_: Any) -> Any:
        return self.launch

    def launch(self, *given: Any) -> None:
        """As Triton's launcher, it calls hooks that are not None."""
        metadata, enter, leave = given[6:9]
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        self.launches.append(Launch(given[:6], given[6:9], given[9:]))

    def compile(self, source: Any, **_: Any) -> Any:
        """In the place of the compiler: a kernel of which there is the name of its function."""
        return SimpleNamespace(
            run=self.launch,
            function=next(self._functions),
            packed_metadata=(source.signature, source.constants, source.attrs),
            launch_metadata=lambda *_: {"name": source.fn.fn.__name__},
        )


def stand_in() -> StandIn:
    """A driver in the place of the process's own."""
    made = StandIn()
    driver.set_active(made)
    return made

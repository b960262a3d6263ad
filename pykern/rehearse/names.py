"""torch.cuda's names, as a box with its GPUs has them, where the CPU computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # which refuses two names for one function, so it is loaded before

from ..boxes import Box, BoxDevice
from .host_waits import HostWaits


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# Functions that do nothing here, or always return the same.
_CONSTANTS: Mapping[str, Any] = {
    **dict.fromkeys(
        ("init", "set_device", "set_stream", "empty_cache", "reset_peak_memory_stats"),
        _returns(None),
    ),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        _returns(0),
    ),
    **dict.fromkeys(("set_rng_state", "set_rng_state_all"), _returns(None)),
    "get_rng_state_all": _returns([]),
    "is_available": _returns(True),
    "is_bf16_supported": _returns(True),
    "current_device": _returns(0),
}


class _StandIn:
    """Takes the place of a stream or an event: the CPU computes in the order of the script."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        """Any two events are a millisecond apart."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _StandIn()

    def record(self, *_: object) -> None: ...

    wait = wait_event = wait_stream = record


@contextmanager
def gpus_of(box: Box, waits: HostWaits) -> Iterator[None]:
    """Within it torch.cuda has the box's GPUs."""
    with ExitStack() as undo:
        for name, value in _names(box, waits).items():
            undo.enter_context(replaced(torch.cuda, name, value))
        # A torch with CUDA would take its name for a driver: for pinned memory, and a step of Adam.
        undo.enter_context(replaced(torch.accelerator, "current_accelerator", _returns(None)))
        undo.enter_context(replaced(torch.version, "cuda", torch.version.cuda or "13.0"))
        undo.enter_context(
            replaced(torch.amp.autocast_mode.autocast, "__init__", _of_cpu(torch.autocast.__init__))
        )
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _names(box: Box, waits: HostWaits) -> Mapping[str, Any]:
    def waiting(*_: object, **__: object) -> None:
        waits.note("synchronize")

    class Event(_StandIn):
        synchronize = waiting

    class Stream(Event):
        pass

    def device(index: Any = None) -> BoxDevice:
        number = index if isinstance(index, int) else torch.device(index or "cuda").index
        return box.devices[number or 0]

    def total(index: Any = None) -> int:
        return int(device(index).memory_bytes or 0)

    return {
        **_CONSTANTS,
        "device_count": _returns(len(box.devices)),
        "synchronize": waiting,
        "Stream": Stream,
        "Event": Event,
        "stream": Stream,
        "device": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "get_device_name": lambda index=None: device(index).name,
        "get_device_properties": lambda index=None: SimpleNamespace(
            name=device(index).name, total_memory=total(index)
        ),
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "mem_get_info": lambda index=None: (total(index), total(index)),
    }


def _of_cpu(make: Callable[..., None]) -> Callable[..., None]:
    """Autocast of GPUs becomes that of the CPU, in the same type."""

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        make(self, device_type, dtype, *args, **named)

    return autocast

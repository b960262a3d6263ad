"""torch.cuda's names, as a box with its GPUs has them, where the CPU computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # which lists functions by their names, so it is loaded before

from ..attributes import replaced
from ..boxes import Box, BoxDevice
from .host_waits import HostWaits
from .lines import called_by, library_of


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _all_return(value: Any, *names: str) -> Mapping[str, Any]:
    # A function for each, as dynamo refuses two names for one.
    return {name: _returns(value) for name in names}


# Functions that do nothing here, or always return the same: of torch.cuda and torch.accelerator,
_OF_MEMORY: Mapping[str, Any] = {
    **_all_return(None, "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    **_all_return(0, "memory_allocated", "max_memory_allocated"),
    **_all_return(0, "memory_reserved", "max_memory_reserved"),
    "memory_stats": lambda *_, **__: defaultdict(int),
}
# of torch.cuda alone,
_OF_CUDA: Mapping[str, Any] = {
    **_OF_MEMORY,
    **_all_return(None, "init", "set_stream", "ipc_collect", "set_sync_debug_mode"),
    **_all_return(None, "set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction"),
    **_all_return(None, "reset_max_memory_allocated", "reset_max_memory_cached"),
    **_all_return(None, "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
    **_all_return(0, "current_device", "get_sync_debug_mode", "utilization", "memory_usage"),
    **_all_return(0, "temperature", "power_draw", "clock_rate", "device_memory_used"),
    **_all_return(True, "is_available", "is_bf16_supported"),
    **_all_return(True, "can_device_access_peer"),
    **_all_return([], "get_rng_state_all", "memory_snapshot"),
    "get_per_process_memory_fraction": _returns(1.0),
    "initial_seed": torch.initial_seed,
    "is_current_stream_capturing": _returns(False),
    "memory_summary": _returns(""),
}
# and of torch.cuda.nvtx.
_OF_NVTX = _all_return(0, "mark", "range_push", "range_pop", "range_start", "range_end")


class _StandIn:
    """Takes the place of a stream or an event: the CPU computes in the order of the script."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _: object) -> float:
        """Any two events are a millisecond apart."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event or _StandIn()

    def record(self, *_: object) -> None: ...

    wait = wait_event = wait_stream = record


def require_gpu(number: int, num_gpus: int) -> int:
    """The number of a GPU, if the box has it.

    Raises:
        RuntimeError: it does not, as torch would raise there.
    """
    if not 0 <= number < num_gpus:
        raise RuntimeError(
            f"device must be one of the box's GPUs, 0 to {num_gpus - 1}, got {number}. Rehearse on "
            "a box with more"
        )
    return number


@contextmanager
def gpus_of(box: Box, waits: HostWaits) -> Iterator[None]:
    """Within it torch.cuda has the box's GPUs."""
    with ExitStack() as undo:
        of_cuda = _names(box, waits)
        for owner, names in (
            (torch.cuda, of_cuda),
            (torch.cuda.nvtx, _OF_NVTX),
            (torch.accelerator, _accelerator(of_cuda)),
        ):
            # Some came after torch 2.11.
            for name in filter(partial(hasattr, owner), names):
                undo.enter_context(replaced(owner, name, names[name]))
        undo.enter_context(replaced(torch.Tensor, "record_stream", _returns(None)))
        undo.enter_context(replaced(torch.version, "cuda", torch.version.cuda or "13.0"))
        undo.enter_context(
            replaced(torch.amp.autocast_mode.autocast, "__init__", _of_cpu(torch.autocast.__init__))
        )
        yield


def _names(box: Box, waits: HostWaits) -> Mapping[str, Any]:
    def waiting(*_: object, **__: object) -> None:
        waits.note("synchronize")

    class Event(_StandIn):
        synchronize = waiting

    class Stream(Event):
        pass

    def device(index: Any = None) -> BoxDevice:
        number = index if isinstance(index, int) else torch.device(index or "cuda").index
        return box.devices[require_gpu(number or 0, len(box.devices))]

    def total(index: Any = None) -> int:
        return int(device(index).memory_bytes or 0)

    def capability(index: Any = None) -> tuple[int, int]:
        if (found := device(index).capability) is None:
            raise ValueError(
                f"box must tell the capability of {device(index).name} for this script, got null. "
                "Write it into the profile, such as [9, 0]"
            )
        return found

    def properties(index: Any = None) -> SimpleNamespace:
        of = device(index)
        known = SimpleNamespace(name=of.name, total_memory=total(index))
        # A script that asks for others fails there.
        if of.capability is not None:
            known.major, known.minor = of.capability
        if of.num_processors is not None:
            known.multi_processor_count = of.num_processors
        return known

    return {
        **_OF_CUDA,
        "device_count": _returns(len(box.devices)),
        "synchronize": waiting,
        "Stream": Stream,
        "Event": Event,
        "stream": Stream,
        "device": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "set_device": partial(_set_device, device),
        "get_device_name": lambda index=None: device(index).name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "mem_get_info": lambda index=None: (total(index), total(index)),
    }


def _set_device(device: Callable[[Any], BoxDevice], index: Any) -> None:
    # torch takes a negative number for no change.
    if not (isinstance(index, int) and index < 0):
        device(index)


def _accelerator(of_cuda: Mapping[str, Any]) -> Mapping[str, Any]:
    """The names of torch.accelerator. torch itself finds none, which it would ask for a driver."""

    def is_seen(*_: object, **__: object) -> bool:
        return library_of(called_by()) != "torch"

    same = ("set_stream", "device_count", "synchronize", "current_stream")
    return {
        **_OF_MEMORY,
        **{name: partial(of_cuda[name]) for name in same},
        **_all_return(None, "empty_host_cache"),
        **_all_return(0, "current_device_index", "current_device_idx"),
        "is_available": is_seen,
        "current_accelerator": lambda *_, **__: torch.device("cuda") if is_seen() else None,
        "set_device_index": partial(of_cuda["set_device"]),
        "set_device_idx": partial(of_cuda["set_device"]),
        "device_index": partial(of_cuda["device"]),
        "get_memory_info": partial(of_cuda["mem_get_info"]),
    }


def _of_cpu(make: Callable[..., None]) -> Callable[..., None]:
    """Autocast of GPUs becomes that of the CPU, in the same type."""

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        make(self, device_type, dtype, *args, **named)

    return autocast

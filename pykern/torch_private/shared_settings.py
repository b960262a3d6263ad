"""Settings of torch's that all threads of a process share, and that layers change for a block.

Such blocks are `with sdpa_kernel(...)` and `with torch.backends.cudnn.flags(...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Any

import torch
from torch.nn.attention import _backend_names

# The values of `_SETTINGS`, then the order of the backends of attention.
SharedSettings = tuple[Any, ...]

_C: Any = torch._C
_ORDER = "sdpa_kernel"


def _set_determinism(enabled: bool) -> None:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


# The name that users know, and the functions that read and set it.
_SETTINGS: list[tuple[str, Callable[[], Any], Callable[[Any], object]]] = [
    *(
        (
            "sdpa_kernel",
            getattr(_C, f"_get_{name}_sdp_enabled"),
            getattr(_C, f"_set_sdp_use_{name}"),
        )
        for name in _backend_names
    ),
    ("cudnn.enabled", _C._get_cudnn_enabled, _C._set_cudnn_enabled),
    ("cudnn.benchmark", _C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    ("cudnn.deterministic", _C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    ("mkldnn.enabled", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    ("use_deterministic_algorithms", _C._get_deterministic_algorithms, _set_determinism),
    ("set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
]
_READS = [read for _, read, _ in _SETTINGS]


def shared_settings() -> SharedSettings:
    """The settings as they are now."""
    return (*map(call, _READS), *_C._get_sdp_priority_order())


def set_shared_settings(settings: SharedSettings) -> None:
    """Sets those that are not as given."""
    values, order = settings[: len(_SETTINGS)], list(settings[len(_SETTINGS) :])
    for (_, read, write), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            write(value)
    if _C._get_sdp_priority_order() != order:
        _C._set_sdp_priority_order(order)


def changed_settings(before: SharedSettings) -> list[str]:
    """The names of those that have changed since, each once."""
    names = [*(name for name, _, _ in _SETTINGS), *[_ORDER] * (len(before) - len(_SETTINGS))]
    places = zip(names, before, shared_settings(), strict=True)
    return list(dict.fromkeys(name for name, then, now in places if then != now))

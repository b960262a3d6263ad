"""Has the CPU compute what a script gives to GPUs, and sees where the host would wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..attributes import replaced
from ..tensors.trees import all_tensors
from .host_waits import HostWaits
from .lines import called_by, called_by_runtime
from .names import require_gpu

_CPU = torch.device("cpu")
# The device of a GPU's tensors, as scripts see it: it computes as the CPU, and is told from it.
_GPU = torch.device("cpu", 0)
_DEVICE_OF = torch.Tensor.device.__get__
# Functions by which the host reads what a GPU computes.
_WAITS = frozenset(
    [
        *("item", "tolist", "numpy", "__array__", "is_nonzero", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "__repr__", "__format__"),
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    ]
)
_INDEXING = frozenset(["__getitem__", "__setitem__", "index_put", "index_put_"])
_MOVES = frozenset(["to", "cuda", "cpu"])
# Functions that make a tensor on the default device, which a script may set to a GPU.
_MAKERS = frozenset(
    [
        *("tensor", "as_tensor", "scalar_tensor", "empty", "empty_strided"),
        *("zeros", "ones", "full"),
        *("eye", "arange", "linspace", "logspace", "tril_indices", "triu_indices"),
        *("rand", "randn", "randint", "randperm", "normal"),
    ]
)


class OnCpu(TorchFunctionMode):
    """A mode in which GPUs are the CPU.

    A tensor that the script moves to a GPU, or makes there, becomes another tensor of the CPU, and
    the mode remembers that it is a GPU's. So are results of functions with such an argument, and
    within an action of a pipeline all tensors.

    Args:
        waits: where the host waits.
        num_gpus: of the box; None for any number.
    """

    def __init__(self, waits: HostWaits, num_gpus: int | None = None) -> None:
        super().__init__()
        self._waits, self._num_gpus = waits, num_gpus
        self._paused = False
        self._makes_on_gpu = False
        self._on_gpus: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within it the mode is on, with functions of torch that name devices and show no mode."""
        load, set_default = torch.load, torch.set_default_device

        def load_here(file: Any, map_location: Any = None, *args: Any, **named: Any) -> Any:
            if callable(map_location):
                return load(file, map_location, *args, **named)
            found = load(file, _CPU, *args, **named)
            if self._is_gpu(map_location):
                self.put(all_tensors(found))
            return found

        def set_default_here(device: Any) -> None:
            self._makes_on_gpu = self._is_gpu(device)
            set_default(None if self._makes_on_gpu else device)

        with (
            self,
            self._parameters(),
            replaced(torch, "load", load_here),
            replaced(torch, "set_default_device", set_default_here),
        ):
            yield

    @contextmanager
    def _parameters(self) -> Iterator[None]:
        """Within it a parameter that is made of a GPU's tensor is a GPU's, which no mode sees."""
        new = vars(nn.Parameter)["__new__"]

        def made(cls: Any, data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
            parameter: Tensor = new(cls, data, requires_grad)
            if data is not None and self._is_on_gpu(data):
                self.put([parameter])
            return parameter

        nn.Parameter.__new__ = staticmethod(made)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Parameter.__new__ = new  # type: ignore[method-assign]

    def paused(self) -> AbstractContextManager[None]:
        """Within it everything is as it is without the mode."""
        return replaced(self, "_paused", True)

    def put(self, tensors: Any) -> None:
        """These tensors are on GPUs."""
        for tensor in tensors:
            self._on_gpus[tensor] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function on the CPU."""
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        answer = self._answer(name, func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if self._waits_for(name, args):
            self._waits.note(name.strip("_"))
        asked = kwargs.get("device")
        to_gpu = self._is_gpu(asked)
        if asked is None and self._makes_on_gpu and name in _MAKERS and not called_by_runtime():
            to_gpu = True
        if to_gpu:
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        if name == "__set__":
            # `tensor.data = other`, by which modules move.
            self._set(*args[:2])
        elif to_gpu or (asked is None and self._any_on_gpu((args, kwargs))):
            self.put(all_tensors(result))
        return result

    def _answer(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that is about devices; NotImplemented for others."""
        if name == "pin_memory":
            return args[0]
        if name == "_parse_to":
            # The arguments of a module's `to`, for which it calls that of its tensors.
            device, *how = func(*map(_named, args), **{key: _named(kwargs[key]) for key in kwargs})
            like = args[0] if args else kwargs.get("tensor")
            of_gpu = isinstance(like, Tensor) and self._is_on_gpu(like)
            return (_GPU if of_gpu else device, *how)
        if name == "get_device" and self._is_on_gpu(args[0]) and not called_by_runtime():
            return 0
        if func == _DEVICE_OF and self._is_on_gpu(args[0]) and not called_by_runtime():
            return _GPU
        if name in _MOVES and not called_by_runtime():
            return self._move(name, args, kwargs)
        return NotImplemented

    def _waits_for(self, name: str, args: Any) -> bool:
        if name in _INDEXING:
            masks = [
                each for each in all_tensors(args[1:2]) if each.dtype in (torch.bool, torch.uint8)
            ]
            return bool(masks) and self._is_on_gpu(args[0])
        if name == "where":
            # Places where a condition holds, whose number is not known; else a choice of two.
            return len(args) == 1 and self._any_on_gpu(args)
        return name in _WAITS and bool(args) and self._any_on_gpu(args[:1])

    def _move(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """`to`, `cuda` or `cpu` as a copy where the device changes."""
        tensor, was_there = args[0], self._is_on_gpu(args[0])
        args, to_gpu = self._target(name, args, kwargs)
        if to_gpu is None or (name == "to" and not to_gpu and _groups_devices()):
            to_gpu = was_there
        if was_there and not to_gpu and not kwargs.get("non_blocking", False):
            self._waits.note(name)
        if self._is_gpu(kwargs.get("device")):
            kwargs["device"] = _CPU
        # The place of `copy` among the arguments depends on the first one.
        place = 4 if args[1:] and isinstance(args[1], torch.dtype | Tensor) else 5
        if to_gpu != was_there and len(args) < place:
            kwargs["copy"] = True
        moved: Tensor = tensor.to(*args[1:], **kwargs) if args[1:] or kwargs else tensor
        if to_gpu:
            self.put([moved])
        return moved

    def _target(self, name: str, args: Any, kwargs: Any) -> tuple[Any, bool | None]:
        """The arguments of `to` for the CPU, and whether they name a GPU; None for no device."""
        if name != "to":
            kwargs.pop("memory_format", None)
            self._is_gpu(kwargs.pop("device", args[1] if name == "cuda" and args[1:] else None))
            return (args[0], _CPU), name == "cuda"
        given = kwargs.get("device", args[1] if len(args) > 1 else kwargs.get("other"))
        if isinstance(given, Tensor):
            return args, self._is_on_gpu(given)
        if given is None or isinstance(given, torch.dtype):
            return args, None
        if not self._is_gpu(given):
            return args, False
        return (args if "device" in kwargs else (args[0], _CPU, *args[2:])), True

    def _set(self, tensor: Any, value: Any) -> None:
        if isinstance(tensor, Tensor) and isinstance(value, Tensor):
            if self._is_on_gpu(value):
                self.put([tensor])
            else:
                self._on_gpus.pop(tensor, None)

    def _is_gpu(self, device: Any) -> bool:
        """Whether it names a GPU; refuses one that the box does not have."""
        if isinstance(device, str) and device.startswith("cuda"):
            device = torch.device(device)
        elif isinstance(device, int) and not isinstance(device, bool):
            device = torch.device("cuda", device)
        if not isinstance(device, torch.device) or (device.type != "cuda" and device != _GPU):
            return False
        if self._num_gpus is not None:
            require_gpu(device.index or 0, self._num_gpus)
        return True

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        return self._waits.acting or tensor in self._on_gpus

    def _any_on_gpu(self, tree: Any) -> bool:
        return any(map(self._is_on_gpu, all_tensors(tree)))


def _groups_devices() -> bool:
    """Whether torch moves tensors to each other's devices, all of which it takes for the CPU."""
    module = called_by()
    return module.startswith("torch.") and module != nn.Module.__module__


def _named(device: Any) -> Any:
    """A GPU by its name, as torch without CUDA takes no number; anything else as it is."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cuda", device) if is_number else device

"""cuda.bindings.driver over the fake driver, for sections of the GPU session.

Functions return a status and then their results, as the package's do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.device_oracle.oracle import Stream, load
from tests.fake_cuda.fake import FakeCuda

# Functions that make an object, each with the function that ends it.
MAKES = {
    "cuEventCreate": "cuEventDestroy",
    "cuGraphCreate": "cuGraphDestroy",
    "cuGraphInstantiateWithFlags": "cuGraphExecDestroy",
    "cuGreenCtxCreate": "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate": "cuStreamDestroy",
}
# Functions whose first argument is where a result goes.
TELLS = (
    *("cuCtxGetCurrent", "cuDeviceGet", "cuDriverGetVersion", "cuDevResourceGenerateDesc"),
    *("cuGraphAddChildGraphNode", "cuGraphAddMemcpyNode"),
)


class Status(int):
    """The result of a function; 0 is success."""

    @property
    def name(self) -> str:
        return f"error {int(self)}"


class Sms(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint) for name in ("smCount", "least", "step"))


class Resource(ctypes.Structure):
    """As DevResource in csrc/cuda/api.hpp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sm", Sms),
        ("rest", ctypes.c_ubyte * 36),
    )


def _end(end: str) -> tuple[tuple[str, Any], ...]:
    size, kind = ctypes.c_size_t, ctypes.c_uint
    names = [f"{end}XInBytes", f"{end}Y", f"{end}Z", f"{end}Detail"]
    pointers = [f"{end}Host", f"{end}Device", f"{end}Array", f"{end}Reserved"]
    sizes = [f"{end}Pitch", f"{end}Height"]
    return (
        *((name, size) for name in names),
        (f"{end}MemoryType", kind),
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, size) for name in sizes),
    )


class Copy3D(ctypes.Structure):
    """As Memcpy3D in csrc/cuda/api.hpp."""

    _fields_ = (
        *_end("src"),
        *_end("dst"),
        *((name, ctypes.c_size_t) for name in ("WidthInBytes", "Height", "Depth")),
    )


class Bindings:
    """Takes the place of the module."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    # The fake has unified addresses alone.
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=4)
    CUdeviceptr = int
    CUDA_MEMCPY3D = Copy3D

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            given = map(_passed, arguments)
            if name not in MAKES and name not in TELLS:
                return (Status(self._fake.result(name, *given)),)
            made = ctypes.c_void_p()
            status = Status(self._fake.result(name, ctypes.byref(made), *given))
            if status == 0 and name in MAKES:
                self._fake._undo.append((MAKES[name], made.value or 0))
            return status, made.value or 0

        return call

    def cuStreamCreateWithPriority(self, *_: int) -> tuple[Any, ...]:
        return Status(0), self._fake.stream(0)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return self.cuGraphInstantiateWithFlags(graph, flags)

    def cuMemcpyAsync(self, to: int, source: int, num_bytes: int, stream: int) -> tuple[Any, ...]:
        """A capture has the operations of torch alone, so there it is one."""
        if not load().oracle_is_capturing():
            given = map(ctypes.c_void_p, (to, source, num_bytes, stream))
            return (Status(self._fake.result("cuMemcpyAsync", *given)),)
        on_stream: Any = torch.cuda.stream
        with on_stream(Stream(0, stream)):
            bytes_at(to, num_bytes).copy_(bytes_at(source, num_bytes))
        return (Status(0),)

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:
        found = Resource()
        ends = ctypes.c_int(device), ctypes.byref(found), ctypes.c_int(kind)
        return Status(self._fake.result("cuDeviceGetDevResource", *ends)), found

    def cuDevSmResourceSplitByCount(
        self, num_groups: int, whole: Resource, flags: int, least: int
    ) -> tuple[Any, ...]:
        parts, made = (Resource * num_groups)(), ctypes.c_uint(num_groups)
        status = self._fake.result(
            "cuDevSmResourceSplitByCount",
            *(parts, ctypes.byref(made), ctypes.byref(whole), None),
            *(ctypes.c_uint(flags), ctypes.c_uint(least)),
        )
        return Status(status), list(parts), made.value, None


def _passed(argument: Any) -> Any:
    """An argument as a function of C takes it."""
    if isinstance(argument, list):
        kind = type(argument[0]) if argument and not isinstance(argument[0], int) else None
        return ((kind or ctypes.c_void_p) * len(argument))(*argument)
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    return ctypes.c_void_p(argument)


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    device = torch.device("cuda", 0)
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

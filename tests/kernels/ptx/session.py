"""Executes launches of kernels: in the place of a GPU, the interpreter of compiled kernels.

It is for a process of its own, where Triton is not interpreted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.backends.compiler import GPUTarget

from pykern.kernels.gpu.launching import Launched
from tests.kernels.ptx.frame import Counts, Frame
from tests.kernels.ptx.machine import run
from tests.kernels.ptx.memory import Region, Space
from tests.kernels.ptx.parsed import Kernel, parsed
from tests.kernels.stand_in import StandIn


@dataclass(frozen=True)
class Executed:
    """A launch that has run.

    Attributes:
        name: of the kernel: its module and its function.
        compiled: by Triton.
        counts: of instructions and bytes.
        touched: bytes of tensors that were read and that were written, each once.
    """

    name: str
    compiled: Any
    counts: Counts
    touched: tuple[int, int]


class Target(StandIn):
    """A GPU of some compute capability, 80 for 8.0, that is not there."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Session:
    """Executes every launch within `executed`.

    Attributes:
        edit: changes the text of a kernel before it runs.
        executed: launches so far.
    """

    def __init__(self, capability: int) -> None:
        self.driver = Target()
        self.driver.capability = capability
        self.edit: Callable[[str], str] = lambda text: text
        self.executed: list[Executed] = []
        self._empty = torch.empty
        self._fresh: set[int] = set()
        # Memory that is freed could be handed out again under the name of other memory.
        self._kept: list[Tensor] = []
        self._regions: dict[int, Region] = {}

    def empty(self, *shape: Any, **named: Any) -> Tensor:
        """As torch.empty: nothing has written it, and to read it is a fault."""
        result = self._empty(*shape, **named)
        result.view(-1).view(torch.uint8).fill_(0xFF)
        self._fresh.add(result.untyped_storage().data_ptr())
        self._kept.append(result)
        return result

    def launch(self, kernel: Any, grid: Sequence[int], *given: Any, **named: Any) -> None:
        """Executes a kernel of Triton's JIT."""
        compiled = kernel.warmup(*given, grid=tuple(grid), **named)
        arguments = dict(zip(kernel.arg_names, given, strict=False)) | named
        name = kernel.fn.__module__.rpartition(".")[2] + "." + kernel.fn.__name__
        self.execute(name, compiled, grid, arguments)

    def execute(
        self, name: str, compiled: Any, grid: Sequence[int], arguments: dict[str, Any]
    ) -> None:
        """Executes a compiled kernel, with arguments by the names of its parameters."""
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
        space = Space()
        space.regions = [self._region(x) for x in unique_storages(tensors)]
        for region in space.regions:
            region.begin()
            region.allowed[:] = False
        for tensor in tensors:
            if tensor.numel():
                _allow(self._region(tensor), tensor)
        frame = self._frame(compiled, grid, space)
        values = [
            _bits(arguments[name], kind)
            for name, kind in compiled.src.signature.items()
            if kind != "constexpr"
        ]
        # Triton adds two places of scratch memory, which no kernel here uses.
        frame.arguments = dict(zip(frame.kernel.parameters, [*values, 0, 0], strict=True))
        run(frame)
        touched = (
            sum(int(region.touched_by_reads.sum()) for region in space.regions),
            sum(int(region.touched_by_writes.sum()) for region in space.regions),
        )
        self.executed.append(Executed(name, compiled, frame.counts, touched))

    def written(self, tensor: Tensor) -> bool:
        """Whether kernels have written every element of a tensor that `empty` made."""
        region = self._region(tensor)
        _allow(region, tensor, fresh := np.zeros_like(region.allowed))
        return bool(region.written[fresh].all())

    def _frame(self, compiled: Any, grid: Sequence[int], space: Space) -> Frame:
        x, y, z = (*grid, 1, 1)[:3]
        metadata = compiled.metadata
        kernel = _parsed(self.edit(compiled.asm["ptx"]))
        return Frame(kernel, (x, y, z), metadata.num_warps * 32, metadata.shared, space)

    def _region(self, tensor: Tensor) -> Region:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        region = self._regions.get(base)
        if region is None or region.content.size != storage.nbytes():
            region = self._regions[base] = Region(base, self._content(tensor), "a tensor")
            region.written[:] = base not in self._fresh
        return region

    def _content(self, tensor: Tensor) -> NDArray[np.uint8]:
        """The bytes of a tensor's whole memory."""
        whole = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        return whole.numpy()

    @contextmanager
    def executing(self) -> Iterator[Session]:
        """Launches within it are executed. Nothing is remembered of launches before it."""
        self.executed, self._kept = [], []
        self._fresh.clear()
        self._regions.clear()

        def launch(kernel: Launched, *given: Any, **named: Any) -> None:
            self.launch(kernel.kernel, *given, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Launched, "_launch", launch)
            patch.setattr(torch, "empty", self.empty)
            yield self


Made = TypeVar("Made", bound=Session)


def session(capability: int) -> Session:
    """A session in the place of the process's driver."""
    return active(Session(capability))


def active(made: Made) -> Made:
    """Puts a session in the place of the process's driver."""
    from triton.runtime import driver  # noqa: PLC0415

    driver.set_active(made.driver)
    return made


def unique_storages(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A tensor with elements for each storage."""
    return list({x.untyped_storage().data_ptr(): x for x in tensors if x.numel()}.values())


@cache
def _parsed(text: str) -> Kernel:
    return parsed(text)


def _allow(region: Region, tensor: Tensor, into: Any = None) -> None:
    """Marks the bytes of the elements of a tensor."""
    into = region.allowed if into is None else into
    size = tensor.element_size()
    starts = np.array([tensor.storage_offset() * size])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(length) * (stride * size)
        starts = (starts[:, None] + steps).reshape(-1)
    into[(starts[:, None] + np.arange(size)).reshape(-1)] = True


def _bits(value: Any, kind: str) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind == "fp32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    assert kind[0] in "iu", kind
    return int(value)

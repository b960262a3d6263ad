"""Runs what launches Triton's kernels on `cuda:0` of the device oracle: whoever wrote the kernels.

Launches are executed by the interpreter of compiled kernels, on the memory of the oracle's tensors.
torch's own operations are counted as well, by what the fake driver is told of them. It is for a
process of its own, where Triton is not interpreted.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from pykern.kernels.operation import _Launcher
from tests.device_oracle import oracle
from tests.fake_cuda.fake import FakeCuda
from tests.kernels.ptx.session import Session, active

jit: Any = importlib.import_module("triton.runtime.jit")
_call_launcher = _Launcher.__call__


class Observed:
    """The work of a GPU since `clear`.

    Args:
        session: executes launches.
        fake: is told of torch's own operations.

    Attributes:
        num_forms: the most configurations of a kernel of torch.compile.
    """

    def __init__(self, session: Session, fake: FakeCuda) -> None:
        self.session = session
        self._fake = fake
        self.clear()

    def clear(self) -> None:
        self.session.executed.clear()
        self._seen = len(self._fake.log)
        self.num_forms = 1

    def counts(self) -> dict[str, Any]:
        """Launches, instructions and bytes, of Triton's kernels and of torch's operations."""
        launches = self.session.executed
        torchs = [_bytes_told(line) for line in self._fake.log[self._seen :] if _is_work(line)]
        of_triton = sum(x.counts.loaded + x.counts.stored for x in launches)
        return {
            "kernels": [launch.name for launch in launches],
            "forms": self.num_forms,
            "launches": len(launches) + len(torchs),
            "of_torch": len(torchs),
            "instructions": sum(launch.counts.warps for launch in launches),
            "memory_instructions": sum(x.counts.loads + x.counts.stores for x in launches),
            "distinct_bytes": sum(map(sum, (x.touched for x in launches))) + sum(torchs),
            "bytes": of_triton + sum(torchs),
        }


class OnOracle(Session):
    """Finds the bytes of tensors of the oracle's GPU, which are in memory of the host."""

    def empty(self, *shape: Any, **named: Any) -> Tensor:
        """As torch.empty. Memory comes back, so whether something has written it is not judged."""
        result: Tensor = self._empty(*shape, **named)
        return result

    def _content(self, tensor: Tensor) -> NDArray[np.uint8]:
        storage = tensor.untyped_storage()
        memory = ctypes.c_uint8 * storage.nbytes()
        return np.ctypeslib.as_array(memory.from_address(storage.data_ptr()))


@contextmanager
def observed(capability: int = 90) -> Iterator[Observed]:
    """Within it there is one GPU, and whatever is launched on it is executed."""
    made = active(OnOracle(capability))
    with oracle.gpus(1) as fake, pytest.MonkeyPatch.context() as patch:
        # The oracle has twins compute what has kernels; here the kernels are asked for.
        patch.setattr(_Launcher, "__call__", _call_launcher)
        run = jit.JITFunction.run

        def launch(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            if warmup:
                return run(kernel, *given, grid=grid, warmup=True, **named)
            return made.launch(kernel, grid(named) if callable(grid) else grid, *given, **named)

        patch.setattr(jit.JITFunction, "run", launch)
        with made.executing():
            yield Observed(made, fake)


def _is_work(line: str) -> bool:
    return line.startswith("work fake_kernel")


def _bytes_told(line: str) -> int:
    """The bytes that an operation reads and writes."""
    return sum(map(int, re.findall(r" [rw] \d+ (\d+)", line)))

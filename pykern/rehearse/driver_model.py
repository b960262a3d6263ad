"""The model of a CUDA driver, in a library of its own: it checks the order of all that is issued.

It runs copies on the CPU, in any order that streams and events allow, and tells of bytes that two
works touch while nothing orders the two.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from .. import _C

LIBRARY = Path(_C.__file__).with_name("libpykern_driver_model.so")
_REAL = "libcuda.so.1"


class _Access(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_ulonglong),
        ("bytes", ctypes.c_size_t),
        ("writes", ctypes.c_int),
    )


class DriverModel:
    """The model with so many devices, all of them peers unless told otherwise."""

    def __init__(self, num_gpus: int) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        accesses = ctypes.POINTER(_Access)
        self.library.fake_kernel.argtypes = [pointer, ctypes.c_double, accesses, size]
        self.library.fake_violation.restype = ctypes.c_char_p
        self.library.fake_calls.restype = ctypes.c_uint64
        self.library.fake_reset(num_gpus, ctypes.c_uint64(0))
        self.library.fake_allow_undeclared(1)

    def separate(self, num_gpus: int) -> None:
        """No device reaches the memory of another."""
        for device in range(num_gpus):
            for peer in set(range(num_gpus)) - {device}:
                self.library.fake_set_peer(device, peer, 0)

    def begin_step(self) -> None:
        """From here on, waiting for an event that was last recorded before is a violation."""
        self.library.fake_begin_step()

    def kernel(self, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Work of a stream that touches these tensors."""
        touched = [(tensor, 0) for tensor in reads] + [(tensor, 1) for tensor in writes]
        accesses = [_Access(tensor.data_ptr(), tensor.nbytes, how) for tensor, how in touched]
        self.library.fake_kernel(stream, 1.0, (_Access * len(accesses))(*accesses), len(accesses))

    def calls(self, function: str) -> int:
        """The calls of a function of the driver so far."""
        return int(self.library.fake_calls(function.encode()))

    def run_all(self) -> None:
        """Runs all work under way."""
        self.library.fake_run_all()

    @property
    def violations(self) -> list[str]:
        """All that was found wrong."""
        count = self.library.fake_violations()
        texts = [self.library.fake_violation(number).decode() for number in range(count)]
        return [text.replace("fake_kernel", "an action") for text in texts]


@contextmanager
def driver_model(num_gpus: int) -> Iterator[DriverModel]:
    """Within it the core uses the model for its driver."""
    _C.destroy_idle_streams()
    _C.use_cuda_driver(str(LIBRARY))
    try:
        yield DriverModel(num_gpus)
    finally:
        # Streams in a cycle of garbage must go before the next model, which does not know them.
        gc.collect()
        _C.destroy_idle_streams()
        _C.use_cuda_driver(_REAL)

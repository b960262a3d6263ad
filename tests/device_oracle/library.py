"""The library of the tier: how it is built, and what it is told and tells."""

import ctypes
import fcntl
import hashlib
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

from bench.shared_library import ROOT, compiler

FOLDER = Path(__file__).parent
MAX_GPUS = 8
DRIVER = (
    *("CtxSetCurrent", "CtxGetCurrent", "EventCreate", "EventDestroy", "EventRecord"),
    *("EventSynchronize", "EventQuery", "StreamWaitEvent", "StreamSynchronize", "MemcpyAsync"),
)
MODEL = (
    *("complete", "kernel", "order", "add_node"),
    *("alloc", "place_on_host", "lend", "free", "forget", "unsafe"),
)


class Driver(ctypes.Structure):
    """As in driver.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*DRIVER, *MODEL)),
        ("contexts", ctypes.c_void_p * MAX_GPUS),
        ("defaults", ctypes.c_void_p * MAX_GPUS),
        ("num_gpus", ctypes.c_int),
    )


class Counts(NamedTuple):
    """The work that torch has given the driver since the process began.

    Attributes:
        kernels: operations outside captures.
        copies: those between two GPUs.
        host_copies: those between a GPU and the host.
        records: of events.
        waits: of streams for events.
        host_waits: of the host for values.
        draws: operations that draw random numbers.
        captures: graphs that were captured.
        captured: their operations.
        forks: streams that have come into a capture beside its own.
        replayed: operations of graphs that were launched.
        blocks_again: allocations in memory that another tensor had before.
    """

    kernels: int
    copies: int
    host_copies: int
    records: int
    waits: int
    host_waits: int
    draws: int
    captures: int
    captured: int
    forks: int
    replayed: int
    blocks_again: int


def build() -> Path:
    """The library, built if its sources, the compiler or torch have changed since it was."""
    digest = hashlib.sha256(" ".join([*compiler(), torch.__version__]).encode())
    for source in sorted(FOLDER.glob("*.[ch]pp")):
        digest.update(source.read_bytes())
    folder = ROOT / "build/device_oracle" / digest.hexdigest()[:16]
    library = folder / "libdevice_oracle.so"
    folder.mkdir(parents=True, exist_ok=True)
    of_torch = Path(torch.__file__).parent
    headers = of_torch / "include"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            command = [
                *[*compiler(), "-std=c++20", "-O0", "-shared", "-fPIC"],
                *[f"-I{headers}", f"-I{headers / 'torch/csrc/api/include'}"],
                *[str(FOLDER / "operations.cpp"), "-o", str(unfinished)],
                *[f"-L{of_torch / 'lib'}", "-ltorch_cpu", "-lc10"],
                f"-Wl,-rpath,{of_torch / 'lib'}",
            ]
            subprocess.run(command, check=True)
            unfinished.rename(library)
    return library

"""The recorder in the driver's place: built on first use, and told to the extension by its path."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.shared_library import ROOT, compile_library
from pykern import _C

SOURCES = ROOT / "bench/driver_log/recorder.cpp", ROOT / "csrc/cuda/driver.cpp"
# Kept until the process ends, since the extension loads the library in it.
_folder = TemporaryDirectory()


class Recorder:
    """Holds what was written, and takes lines that are not calls of the extension."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def add(self, line: str) -> None:
        """Adds a line with addresses, such as the recorder's own, after the calls so far."""
        self._library.recorder_add(line.encode())

    @property
    def text(self) -> str:
        """All lines so far, with addresses."""
        return self._library.recorder_text().decode()


@contextmanager
def recording(driver: str) -> Iterator[Recorder]:
    """Within it, the extension's calls of a driver are written down.

    Pipelines on GPUs that live before must not be used within, nor those of within after it.

    Args:
        driver: the path or name of its library, which the extension uses afterwards.

    Raises:
        RuntimeError: the driver cannot be loaded.
    """
    library = _load()
    if why := library.recorder_open(driver.encode()):
        raise RuntimeError(why.decode())
    _C.destroy_idle_streams()
    _C.use_cuda_driver(library._name)
    try:
        yield Recorder(library)
    finally:
        gc.collect()
        _C.destroy_idle_streams()
        _C.use_cuda_driver(driver)


@cache
def _load() -> ctypes.CDLL:
    path = Path(_folder.name) / "recorder.so"
    compile_library(SOURCES, path)
    library = ctypes.CDLL(str(path))
    library.recorder_add.argtypes = library.recorder_open.argtypes = [ctypes.c_char_p]
    library.recorder_add.restype = None
    library.recorder_open.restype = library.recorder_text.restype = ctypes.c_char_p
    return library

"""torch's own code for `cuda:0` to `cuda:7`, without a GPU: its dispatcher, its autograd engine.

torch computes on the CPU. The fake driver is told of each operation, with the stream that is
current on its GPU, and judges whether pykern or the engine has put all in order. A process that
has loaded the library has GPUs for good, so these tests have a process of their own.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from pykern.kernels.operation import _Launcher
from tests.device_oracle import tally
from tests.device_oracle.library import DRIVER, MAX_GPUS, MODEL, Counts, Driver, build
from tests.fake_cuda.fake import FakeCuda


@cache
def load() -> ctypes.CDLL:
    """The library; from here on the process has GPUs, also for what is collected late."""
    library = ctypes.CDLL(str(build()))
    library.oracle_stream.restype = ctypes.c_void_p
    library.oracle_capture.restype = ctypes.c_void_p
    library.oracle_capture.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.oracle_drop_graph.argtypes = [ctypes.c_void_p]
    library.oracle_capture_is_empty.restype = ctypes.c_bool
    for name in ("oracle_end_capture", "oracle_failure"):
        getattr(library, name).restype = ctypes.c_char_p
    library.oracle_set_limit.argtypes = [ctypes.c_size_t]
    for name in ("oracle_bytes", "oracle_peak", "oracle_held", "oracle_limit"):
        getattr(library, name).restype = ctypes.c_size_t
    for name, value in _torch_cuda().items():
        setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        # As a torch that has ended a capture itself.
        setattr(torch._C, name, _refuse_pool)
    setattr(torch._C, "_cuda_setStream", _set_stream_by_id)  # noqa: B010 - as mypy wants it
    setattr(torch._C, "_host_emptyCache", lambda: None)  # noqa: B010 - as mypy wants it
    setattr(torch.UntypedStorage, "__new__", _new_storage())  # noqa: B010 - as mypy wants it
    # Triton's kernels are for another processor.
    setattr(_Launcher, "__call__", _call_twin)  # noqa: B010 - as mypy wants it
    torch.version.cuda = "13.0"
    tally.begin(_counted)
    return library


def _counted() -> list[tuple[str, int]]:
    now = counts()
    return [
        ("operations called", now.kernels),
        ("copies between a GPU and the host", now.host_copies),
        ("captures", now.captures),
        ("operations captured", now.captured),
        ("operations replayed", now.replayed),
        ("allocations in memory used before", now.blocks_again),
    ]


def counts() -> Counts:
    into = (ctypes.c_int64 * len(Counts._fields))()
    load().oracle_counts(into)
    return Counts(*into)


@contextmanager
def gpus(num_gpus: int) -> Iterator[FakeCuda]:
    """Within it torch has so many GPUs; in the end no rule is broken, and all is as it was."""
    fake = FakeCuda(num_devices=num_gpus)
    # Tensors are not declared: torch's allocator has other rules.
    fake.allow_undeclared()
    _connect(fake, num_gpus)
    try:
        yield fake
        assert_restored(num_gpus)
        gc.collect()
        fake.synchronize()
        assert load().oracle_failure() is None, load().oracle_failure()
    finally:
        violations = fake.violations
        tally.add(fake)
        fake.close()
    assert not violations, violations[:3]
    assert not fake.leaks, fake.leaks


def assert_restored(num_gpus: int) -> None:
    """The current GPU and torch's current streams are those before the first step."""
    assert load().oracle_gpu() == 0
    assert not any(load().oracle_stream(gpu) for gpu in range(num_gpus))


def _connect(fake: FakeCuda, num_gpus: int) -> None:
    driver = Driver(num_gpus=num_gpus)
    for name in DRIVER:
        setattr(driver, name, fake.library.fake_function(f"cu{name}".encode()))
    for name in MODEL:
        function = getattr(fake.library, f"fake_{name}")
        setattr(driver, name, ctypes.cast(function, ctypes.c_void_p).value)
    _made.fake, _made.num_gpus = fake, num_gpus
    setattr(torch.cuda, "default_generators", ())  # noqa: B010 - not of the stub's type
    for gpu in range(num_gpus):
        driver.contexts[gpu] = fake.retain(gpu)
        driver.defaults[gpu] = fake.default_stream(gpu)
    _made.contexts = list(driver.contexts)
    load().oracle_connect(ctypes.byref(driver))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return load().oracle_gpu() if index is None else index


class Stream(torch.Stream):
    """torch's general stream, under the names of torch.cuda's."""

    def __new__(cls, device: Any = None, handle: int | None = None) -> Stream:
        cuda, gpu = 1, _index(device)  # 1 is the number of the kind of device
        stream = _made.fake.stream(gpu) if handle is None else handle
        return super().__new__(cls, stream_id=stream, device_index=gpu, device_type=cuda)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


def _current(device: Any = None) -> Stream:
    gpu = _index(device)
    return Stream(gpu, load().oracle_stream(gpu) or 0)


def _set_stream(stream: Stream) -> None:
    _set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)


def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
    del device_type
    load().oracle_set_stream(device_index, ctypes.c_void_p(stream_id))
    load().oracle_set_gpu(device_index)


class _OnDevice:
    """A class, since torch asks for its instances."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = load().oracle_gpu()
        load().oracle_set_gpu(self._index)

    def __exit__(self, *_: object) -> None:
        load().oracle_set_gpu(self._before)


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    with _OnDevice(stream.device_index):
        before = _current(stream.device_index)
        _set_stream(stream)
        try:
            yield
        finally:
            _set_stream(before)


class _Graph:
    """Takes the place of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._keeps = keep_graph
        self._fake = _made.fake
        self._graph = self._exec = 0
        self._recorded: int | None = None
        self._gpu = 0
        self._pool = (0, 0)

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        **_: object,
    ) -> None:
        self._gpu = load().oracle_gpu()
        assert load().oracle_stream(self._gpu), "the default stream cannot be captured"
        self._pool = pool or graph_pool()
        self._graph = self._create("cuGraphCreate", ctypes.c_uint(0))
        self._recorded = load().oracle_capture(self._graph, self._pool[1])
        if capture_error_mode == "global":
            self._fake.set_capturing(True)
        elif capture_error_mode == "thread_local":
            self._fake.set_capturing_alone(True)

    def capture_end(self) -> None:
        self._fake.set_capturing(False)
        self._fake.set_capturing_alone(False)
        is_empty = load().oracle_capture_is_empty()
        why = load().oracle_end_capture()
        if why is not None:
            self.reset()
            raise RuntimeError(f"CUDA error: {why.decode()}")
        if is_empty:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=2,
            )
        if not self._keeps:
            self.instantiate()

    def instantiate(self) -> None:
        assert not self._exec, "the handle that was given out would be of a graph that is gone"
        flags = ctypes.c_ulonglong(0)
        graph = ctypes.c_void_p(self._graph)
        self._exec = self._create("cuGraphInstantiateWithFlags", graph, flags)

    def raw_cuda_graph(self) -> int:
        return self._graph

    def raw_cuda_graph_exec(self) -> int:
        return self._exec

    def pool(self) -> tuple[int, int]:
        return self._pool

    def replay(self) -> None:
        stream = _current().cuda_stream or _made.fake.default_stream(load().oracle_gpu())
        with self._within():
            handles = ctypes.c_void_p(self._exec), ctypes.c_void_p(stream)
            self._fake.call("cuGraphLaunch", *handles)

    def reset(self) -> None:
        if self._recorded is not None and _made.fake is self._fake:
            load().oracle_drop_graph(self._recorded)
            with self._within():
                if self._exec:
                    self._fake.result("cuGraphExecDestroy", ctypes.c_void_p(self._exec))
                self._fake.result("cuGraphDestroy", ctypes.c_void_p(self._graph))
        self._recorded = None

    def __del__(self) -> None:
        self.reset()

    def _create(self, name: str, *arguments: object) -> int:
        with self._within():
            return self._fake._made(name, *arguments)

    @contextmanager
    def _within(self) -> Iterator[None]:
        before = ctypes.c_void_p()
        self._fake.call("cuCtxGetCurrent", ctypes.byref(before))
        self._fake.call("cuCtxSetCurrent", ctypes.c_void_p(_made.contexts[self._gpu]))
        try:
            yield
        finally:
            self._fake.call("cuCtxSetCurrent", before)


def graph_pool() -> tuple[int, int]:
    """A pool of memory for graphs; 0 is the memory outside graphs."""
    return 0, next(_pools)


class _Generator:
    """The host's default generator, with an offset that changes where a GPU has drawn."""

    def get_offset(self) -> int:
        return 4 * counts().draws

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)


class _Made:
    """The GPUs that were made last."""

    fake: FakeCuda
    num_gpus = 0
    contexts: Sequence[int] = ()


_made = _Made()
_pools = itertools.count(1)


def _synchronize(_: Any = None) -> None:
    if load().oracle_is_capturing():
        load().oracle_break_capture()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
    _made.fake.synchronize()


def _properties(device: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="the CPU",
        uuid=f"{_index(device)}",
        total_memory=2**30,
        multi_processor_count=132,
        major=9,
        minor=0,
    )


def _free_and_total(device: Any = None) -> tuple[int, int]:
    total = load().oracle_limit()
    return total - load().oracle_held(_index(device)), total


def _empty_cache() -> None:
    """Waits for the GPUs, as the driver does when it is given memory back."""
    _synchronize()
    for gpu in range(_made.num_gpus):
        load().oracle_empty_cache(gpu)


def _torch_cuda() -> dict[str, Any]:
    """The functions of torch.cuda that pykern uses; those of a build for the CPU raise errors."""

    # torch's compiler keeps it in a table, where functions of a library cannot be.
    def current_gpu() -> int:
        return int(load().oracle_gpu())

    return {
        "_lazy_init": _init,
        "init": _init,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: _made.num_gpus,
        "current_device": current_gpu,
        "set_device": lambda device: load().oracle_set_gpu(_index(device)),
        "ExternalStream": lambda handle, device: Stream(device, handle),
        "Stream": Stream,
        "current_stream": _current,
        "set_stream": _set_stream,
        "device": _OnDevice,
        "stream": _on_stream,
        "CUDAGraph": _Graph,
        "graph_pool_handle": graph_pool,
        "is_current_stream_capturing": lambda: bool(load().oracle_is_capturing()),
        "synchronize": _synchronize,
        "empty_cache": _empty_cache,
        "mem_get_info": _free_and_total,
        "memory_snapshot": lambda: [],
        "memory_reserved": lambda device=None: load().oracle_held(_index(device)),
        "memory_allocated": lambda device=None: load().oracle_bytes(_index(device)),
        "max_memory_allocated": lambda device=None: load().oracle_peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: load().oracle_reset_peak(_index(device)),
        "Event": lambda **options: torch.Event("cuda", **options),
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_: True,
        "get_device_name": lambda _=None: "the CPU",
        "get_device_properties": _properties,
        "default_generators": (),
    }


def _init() -> None:
    """torch has no generators of GPUs before."""
    made = (_Generator(),) * MAX_GPUS
    setattr(torch.cuda, "default_generators", made)  # noqa: B010 - not of the stub's type


def _call_twin(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._twin(*args, **kwargs)


def _refuse_pool(*_: object) -> None:
    raise RuntimeError("the pool is not in use")


def _new_storage() -> Callable[..., torch.UntypedStorage]:
    plain = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is not None and torch.device(device).type == "cuda":
            return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()
        kwargs |= {} if device is None else {"device": device}
        return plain(cls, *args, **kwargs)

    return new

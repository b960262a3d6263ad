"""The fake driver's Python face: the model and its controls, built on first use, loaded by ctypes.

The extension is told its path, so a libcuda.so.1 of the machine is not in the way.
"""

import ctypes
import fcntl
import gc
import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from bench.shared_library import EXPORTS, ROOT, compile_library, compiler
from pykern import _C

FOLDERS = (ROOT / "csrc/driver_model", Path(__file__).parent)
API = ROOT / "csrc/cuda/api.hpp"
NON_BLOCKING = 1
PEER_ACCESS_ALREADY_ENABLED = 704
Range = tuple[int, int]  # address, bytes
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Access(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_ulonglong),
        ("bytes", ctypes.c_size_t),
        ("writes", ctypes.c_int),
    )


def build() -> Path:
    """The library, built if its sources or the compiler have changed since it was."""
    files = [file for folder in FOLDERS for file in sorted(folder.glob("*.[ch]pp"))]
    digest = hashlib.sha256(" ".join(compiler()).encode())
    for source in [EXPORTS, API, *files]:
        digest.update(source.read_bytes())
    folder = ROOT / "build/fake_cuda" / digest.hexdigest()[:16]
    library = folder / "libfake_cuda.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            compile_library([file for file in files if file.suffix == ".cpp"], library)
    return library


@cache
def load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
    accesses = ctypes.POINTER(Access)
    for name, result, parameters in [
        ("fake_function", pointer, [ctypes.c_char_p]),
        ("fake_reset", None, [ctypes.c_int, number]),
        ("fake_make_default", None, [pointer]),
        ("fake_set_eagerness", None, [ctypes.c_double]),
        ("fake_set_peer", None, [ctypes.c_int] * 3),
        ("fake_set_corrupt", None, [ctypes.c_int] * 3),
        ("fake_place_on_host", None, [number, ctypes.c_int]),
        ("fake_set_copy_cost", None, [ctypes.c_double] * 2),
        ("fake_set_driver_version", None, [ctypes.c_int]),
        ("fake_alloc", None, [number, size, pointer]),
        ("fake_lend", None, [pointer, number, size]),
        ("fake_free", None, [number]),
        ("fake_forget", None, [number]),
        ("fake_allow_undeclared", None, [ctypes.c_int]),
        ("fake_kernel", None, [pointer, ctypes.c_double, accesses, size]),
        ("fake_launch", None, [pointer, ctypes.c_double, accesses, size]),
        ("fake_order", None, [pointer, pointer]),
        ("fake_complete", ctypes.c_int, [pointer]),
        ("fake_run_all", None, []),
        ("fake_begin_step", None, []),
        ("fake_keep_log", None, [ctypes.c_int]),
        ("fake_log", ctypes.c_char_p, []),
        ("fake_make_graph", pointer, [ctypes.c_double, RUN, pointer]),
        ("fake_make_mix_graph", pointer, [ctypes.c_double, number, accesses, size]),
        ("fake_graph_access", None, [pointer, number, size, ctypes.c_int]),
        ("fake_fail", None, [ctypes.c_char_p] + [ctypes.c_int] * 3),
        ("fake_drop_wait", None, [ctypes.c_int]),
        ("fake_hang", None, [ctypes.c_char_p, ctypes.c_int]),
        ("fake_hang_node", None, [ctypes.c_int]),
        ("fake_let_go", None, [ctypes.c_int]),
        ("fake_set_capturing", None, [ctypes.c_int]),
        ("fake_set_capturing_alone", None, [ctypes.c_int]),
        ("fake_unsafe", ctypes.c_int, [ctypes.c_char_p]),
        ("fake_set_queue", None, [size]),
        ("fake_reuse_handles", None, []),
        ("fake_first_multiprocessor", ctypes.c_uint, [pointer]),
        ("fake_num_multiprocessors", ctypes.c_uint, [pointer]),
        ("fake_violations", ctypes.c_int, []),
        ("fake_forgive", None, []),
        ("fake_violation", ctypes.c_char_p, [ctypes.c_int]),
        ("fake_leaks", ctypes.c_char_p, []),
        ("fake_calls", number, [ctypes.c_char_p]),
        ("fake_staged_copies", number, []),
        ("fake_pageable_copies", number, []),
        ("fake_full_queues", number, []),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


class FakeCuda:
    """A model of a driver, fresh when made. Streams and graphs are addresses, as in torch.

    Objects made through it stand for those that torch makes, and `close` destroys them. A callback
    that computes on the CPU what a device would, has `complete` run what it depends on, computes,
    and tells by `kernel` what it has touched.
    """

    def __init__(self, num_devices: int = 2, seed: int = 0) -> None:
        self.library = load()
        _C.use_cuda_driver(self.library._name)
        self._undo: list[tuple[str, int]] = []
        self._contexts: set[int] = set()
        self._defaults: dict[int, int] = {}
        self._kept: list[object] = []
        self.reset(num_devices, seed)

    def reset(self, num_devices: int, seed: int = 0) -> None:
        """Begins a new model of devices that are all peers of each other."""
        self._undo.clear()
        self._contexts.clear()
        self._defaults.clear()
        _C.destroy_idle_streams()
        self.library.fake_reset(num_devices, seed)
        self.library.fake_keep_log(True)
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the driver, and raises if it fails."""
        if error := self.result(name, *arguments):
            raise RuntimeError(f"{name} failed with {error}")

    def result(self, name: str, *arguments: object) -> int:
        """Calls a function of the driver, and returns its error, 0 for success."""
        address = self.library.fake_function(name.encode())
        assert address is not None, f"no function {name}"
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)(*arguments)

    def retain(self, device: int) -> int:
        """Makes a device's primary context current, as torch does, and returns it."""
        context = self._made("cuDevicePrimaryCtxRetain", ctypes.c_int(device))
        self._undo.append(("cuDevicePrimaryCtxRelease", device))
        self._contexts.add(context)
        self.call("cuCtxSetCurrent", ctypes.c_void_p(context))
        return context

    def stream(self, device: int) -> int:
        """A stream of a device, such as torch's current one."""
        self.retain(device)
        flags, priority = ctypes.c_uint(NON_BLOCKING), ctypes.c_int(0)
        stream = self._made("cuStreamCreateWithPriority", flags, priority)
        self._undo.append(("cuStreamDestroy", stream))
        return stream

    def default_stream(self, device: int) -> int:
        """A handle of torch's default stream that is the same in every context; theirs is 0."""
        if device not in self._defaults:
            self._defaults[device] = self.stream(device)
            self.library.fake_make_default(self._defaults[device])
        return self._defaults[device]

    def graph(
        self,
        run: Callable[[], None],
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        duration_ns: float = 1000,
    ) -> int:
        """A graph of one node that calls run, such as torch captures."""
        function = RUN(lambda _: run())
        self._kept.append(function)
        graph = self.library.fake_make_graph(duration_ns, function, None)
        self._undo.append(("cuGraphDestroy", graph))
        for access in accesses_of(reads, writes):
            self.library.fake_graph_access(graph, access.address, access.bytes, access.writes)
        return graph

    def instantiate(self, graph: int) -> int:
        """An executable graph, such as torch instantiates from its own."""
        executable = self._made(
            "cuGraphInstantiateWithFlags", ctypes.c_void_p(graph), ctypes.c_ulonglong(0)
        )
        self._undo.append(("cuGraphExecDestroy", executable))
        return executable

    def give_back(self, executable: int) -> None:
        """Destroys an executable graph, as torch does when nobody holds it; later, it is gone."""
        made = "cuGraphExecDestroy", executable
        if made in self._undo:
            self._undo.remove(made)
            self.result(made[0], ctypes.c_void_p(executable))

    def keep(self, held: object) -> None:
        """Holds an object until this model is closed."""
        self._kept.append(held)

    def alloc(self, address: int, num_bytes: int, stream: int) -> None:
        """Declares memory, which is of the stream's device and may be used again on it at once."""
        self.library.fake_alloc(address, num_bytes, stream)

    def free(self, address: int) -> None:
        """To be called before the bytes go: it runs the work that touches them."""
        self.library.fake_free(address)

    def forget(self, address: int) -> None:
        """Forgets memory that was freed: the address may come back as something else."""
        self.library.fake_forget(address)

    def allow_undeclared(self, allowed: bool = True) -> None:
        self.library.fake_allow_undeclared(allowed)

    def kernel(
        self,
        stream: int,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        duration_ns: float = 1000,
    ) -> None:
        """Work that touches these ranges: what a callback has just done, by the stream's order."""
        accesses = accesses_of(reads, writes)
        self.library.fake_kernel(
            stream, duration_ns, (Access * len(accesses))(*accesses), len(accesses)
        )

    def order(self, before: int, after: int) -> None:
        """Work issued to `after` from here on comes after the work that `before` holds by now."""
        self.library.fake_order(before, after)

    def complete(self, stream: int) -> bool:
        """Runs what is needed for all on the stream to be done. It orders nothing.

        Returns False where work that hangs is in the way.
        """
        return bool(self.library.fake_complete(stream))

    def synchronize(self) -> bool:
        """Waits for the devices in use, whatever they say; returns whether there are any."""
        if not self._contexts:
            return False  # closed
        before = ctypes.c_void_p()
        self.result("cuCtxGetCurrent", ctypes.byref(before))
        for context in self._contexts:
            self.result("cuCtxSetCurrent", ctypes.c_void_p(context))
            self.result("cuCtxSynchronize")
        self.result("cuCtxSetCurrent", before)
        return True

    def run_all(self) -> None:
        self.library.fake_run_all()

    def begin_step(self) -> None:
        """From here on, waiting for an event that was last recorded before is a violation."""
        self.library.fake_begin_step()

    def set_eagerness(self, probability: float) -> None:
        """How much runs by itself after a call: 0 as late as possible, 1 as early as possible."""
        self.library.fake_set_eagerness(probability)

    def set_peer(self, device: int, peer: int, reachable: bool) -> None:
        self.library.fake_set_peer(device, peer, reachable)

    def set_corrupt(self, device: int, peer: int, corrupt: bool) -> None:
        """Copies that a device writes to its peer's memory lose their last byte, without error."""
        self.library.fake_set_corrupt(device, peer, corrupt)

    def enable_peer(self, device: int, peer: int) -> None:
        """Lets a device reach its peer's memory, and leaves the same context current."""
        before = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(before))
        context = self.retain(peer)
        self.retain(device)
        error = self.result("cuCtxEnablePeerAccess", ctypes.c_void_p(context), ctypes.c_uint(0))
        if error not in (0, PEER_ACCESS_ALREADY_ENABLED):
            raise RuntimeError(f"cuCtxEnablePeerAccess failed with {error}")
        self.call("cuCtxSetCurrent", before)

    def place_on_host(self, address: int, *, pinned: bool = True) -> None:
        """For declared memory: it is the host's, which all devices reach if it is pinned."""
        self.library.fake_place_on_host(address, pinned)

    def lend(self, stream: int, address: int, num_bytes: int) -> None:
        """The host may not change these bytes before it knows the stream's last work to be done."""
        self.library.fake_lend(stream, address, num_bytes)

    def set_copy_cost(self, latency_ns: float, bytes_per_ns: float) -> None:
        self.library.fake_set_copy_cost(latency_ns, bytes_per_ns)

    def set_driver_version(self, version: int) -> None:
        """Functions that came with a later release are not there."""
        self.library.fake_set_driver_version(version)

    def fail(self, function: str, nth: int, error: int, *, sticky: bool = False) -> None:
        """The nth call of a function from now on fails; if sticky, so does every later call."""
        self.library.fake_fail(function.encode(), nth, error, sticky)

    def drop_wait(self, nth: int) -> None:
        """The nth wait of a stream for an event, from now on, is left out."""
        self.library.fake_drop_wait(nth)

    def hang(self, function: str, nth: int = 1) -> None:
        """The work that a function issues as the nth from now on does not end.

        The function is cuMemcpyAsync, cuStreamWaitEvent, cuGraphLaunch or fake_kernel.
        """
        self.library.fake_hang(function.encode(), nth)

    def hang_node(self, nth: int) -> None:
        """The nth node that works of the next launched graph does not end, nor those behind it."""
        self.library.fake_hang_node(nth)

    def let_go(self) -> None:
        """Work that hangs, and all else that is under way, never runs any more."""
        self.library.fake_let_go(0)

    def set_capturing(self, capturing: bool) -> None:
        """Another thread captures, in the mode in which unsafe calls of others break captures."""
        self.library.fake_set_capturing(capturing)

    def set_capturing_alone(self, capturing: bool) -> None:
        """This thread captures, in the mode in which its own unsafe calls alone break captures."""
        self.library.fake_set_capturing_alone(capturing)

    def reuse_handles(self) -> None:
        """New objects get the handles of removed ones, as from the driver."""
        self.library.fake_reuse_handles()

    def calls(self, function: str) -> int:
        return self.library.fake_calls(function.encode())

    @property
    def staged_copies(self) -> int:
        """Copies between devices of which the stream's has no access to the other."""
        return self.library.fake_staged_copies()

    def multiprocessors(self, stream: int) -> range:
        """The multiprocessors of its device for work of the stream."""
        first = self.library.fake_first_multiprocessor(stream)
        return range(first, first + self.library.fake_num_multiprocessors(stream))

    def forgive(self) -> list[str]:
        """Forgets the violations so far, and returns them."""
        found = self.violations
        self.library.fake_forgive()
        return found

    @property
    def violations(self) -> list[str]:
        count = self.library.fake_violations()
        return [self.library.fake_violation(i).decode() for i in range(count)]

    @property
    def log(self) -> list[str]:
        """All that decides who comes before whom, and the violations among it: see
        csrc/driver_model/log.hpp.
        """
        return self.library.fake_log().decode().splitlines()

    @property
    def leaks(self) -> list[str]:
        return self.library.fake_leaks().decode().splitlines()

    def close(self) -> None:
        """Waits for the devices in use, then destroys all that was made through this object."""
        gc.collect()  # a cycle's garbage is not a leak, but must go before the next model
        self.synchronize()
        if log := self.log:
            # torch's sanitizer needs torch, without which some tests run.
            from tests.fake_cuda.second_judge import agree  # noqa: PLC0415

            agree(log)
        # Functions that graphs call may hold objects of the program.
        self._kept.clear()
        gc.collect()
        _C.destroy_idle_streams()
        for name, handle in reversed(self._undo):
            is_device = name == "cuDevicePrimaryCtxRelease"
            self.result(name, ctypes.c_int(handle) if is_device else ctypes.c_void_p(handle))
        self._undo.clear()
        self._defaults.clear()
        self._contexts.clear()

    def _made(self, name: str, *arguments: object) -> int:
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value


def accesses_of(reads: Iterable[Range], writes: Iterable[Range]) -> list[Access]:
    return [
        Access(address, num_bytes, kind)
        for kind, ranges in enumerate((reads, writes))
        for address, num_bytes in ranges
    ]

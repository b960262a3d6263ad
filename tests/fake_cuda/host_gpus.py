"""GPUs that are the host: torch computes on the CPU, the fake driver says in which order.

An action computes at once, when it is called. First everything that its stream waits for is run,
and nothing else that need not be; so what a missing wait leaves undone is not there. Reads, writes
and allocations of the action are then told to the driver's model as one kernel.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pykern import _C
from pykern.runtime.devices import DeviceLane
from pykern.runtime.gpu import cuda, peers
from pykern.runtime.gpu.cuda import CapturedGraph
from pykern.tensors.strides import memory_of
from tests.fake_cuda.beside import Beside, End, Pairs
from tests.fake_cuda.fake import FakeCuda, Range
from tests.fake_cuda.watch import Unexecuted, Watch

# A megabyte by which a pair is checked, for each pipeline anew. Nobody writes to it.
PATTERN_OF = cache(peers.pattern_of)


@contextmanager
def host_gpus(num_gpus: int) -> Iterator[FakeCuda]:
    """For one pipeline: within it pykern finds so many GPUs; in the end no rule is broken."""
    with unchecked_gpus(num_gpus) as fake:
        yield fake
    assert not fake.violations, fake.violations[:3]
    assert not fake.leaks, fake.leaks


@contextmanager
def unchecked_gpus(num_gpus: int) -> Iterator[FakeCuda]:
    """The same for several, where what the one before has left stays in use."""
    fake = FakeCuda(num_devices=num_gpus)
    fake.allow_undeclared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostGpus, "fake", fake, raising=False)
        patch.setattr(cuda, "Gpus", HostGpus)
        patch.setattr(peers, "pattern_of", PATTERN_OF)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        # Lightning sets it, and then a torch with CUDA takes these for GPUs of its own.
        patch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
        yield fake
    fake.close()


class HostGpus:
    """Takes the place of pykern.runtime.gpu.cuda.Gpus."""

    fake: FakeCuda  # set by whoever puts this in its place
    # How long the model says that an action takes: a test may change it while the action runs.
    duration_ns = 1000.0

    def __init__(self, lanes: Sequence[DeviceLane], settle: cuda.Settle) -> None:
        self._settle = settle
        # Held, because the class has none any more when the last pipelines are collected.
        self.fake = self.fake
        self._gpu_of = [lane.device.index for lane in lanes]
        self.lanes = _C.Lanes([(lane.device.index, lane.part, lane.num_parts) for lane in lanes])
        self._callers = {
            gpu: self.fake.stream(gpu) if gpu % 2 else self.fake.default_stream(gpu)
            for gpu in sorted(set(self._gpu_of))
        }
        self._asides = {gpu: self.fake.stream(gpu) for gpu in self._callers}
        self._outside = self._callers
        self.host = self.fake.stream(min(self._callers))
        self._memory = _Memory(self.fake)
        # Nothing tells the model when Python collects this object. If the memory went with it,
        # another pipeline could get addresses that the model takes for this one's.
        self.fake.keep(self._memory)
        self._beside = Beside(self.fake, self.host, settle)
        # The tensors that the action under way has told the driver of, and the stream it runs on.
        self._active: tuple[int, Callable[[], None]] | None = None
        self.errors: list[Exception] = []

    def device(self, lane: int) -> torch.device:
        return torch.device("cpu")

    def callers(self) -> dict[int, int]:
        """By GPU; those with an even number are on torch's default stream, whose handle is 0."""
        return {gpu: 0 if self._is_default(gpu) else self._callers[gpu] for gpu in self._callers}

    def current(self, gpu: int) -> int:
        """A handle of the caller's stream that is the same in every context."""
        return self._callers[gpu]

    def _is_default(self, gpu: int) -> bool:
        return gpu % 2 == 0 and self._callers is self._outside

    @contextmanager
    def step(self) -> Iterator[None]:
        """The caller writes to all that the last step has used before it, and reads it after."""
        self.fake.begin_step()
        self._memory.begin()
        for gpu, stream in self._callers.items():
            self._memory.write_all(gpu, stream)
        yield
        if self.errors:
            raise self.errors.pop()
        for gpu, stream in self._callers.items():
            self._memory.read_all(gpu, stream)
            self.fake.complete(stream)
        self._memory.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        for gpu, stream in self._outside.items():
            self.fake.order(stream, self._asides[gpu])
        self._callers = self._asides
        try:
            yield
        finally:
            self._callers = self._outside

    def mark(self) -> list[tuple[int, Tensor]]:
        """By GPU, a stream that is where its caller is, and what the caller has written there.

        The memory is the outer caller's, which is told of its use by `follow`.
        """
        marks = []
        for gpu, stream in self._callers.items():
            result = self._persistent(1, self._outside[gpu])
            self.fake.kernel(stream, writes=[(result.data_ptr(), 1)])
            mark = self.fake.stream(gpu)
            self.fake.order(stream, mark)
            marks.append((mark, result))
        return marks

    def mark_for_host(self) -> Any:
        """The host, once it has waited, comes after what its callers' streams hold by now."""
        marks = []
        for gpu, stream in self._callers.items():
            marks.append(self.fake.stream(gpu))
            self.fake.order(stream, marks[-1])

        def wait() -> None:
            self._settle(lambda: all([self.fake.complete(mark) for mark in marks]))
            for mark in marks:
                self.fake.complete(mark)
                self.fake.order(mark, self.host)

        return SimpleNamespace(wait=wait)

    def follow(self, marks: list[tuple[int, Tensor]], output: Any) -> None:
        """The callers read what has been written there."""
        for stream, (mark, result) in zip(self._callers.values(), marks, strict=True):
            self.fake.order(mark, stream)
            self.fake.kernel(stream, reads=[(result.data_ptr(), 1)])

    def on_stream(self, lane: int, run: Callable[[int], Any]) -> Callable[[int], Any]:
        def act(microbatch: int) -> Any:
            with self.active(lane):
                return run(microbatch)

        return act

    @contextmanager
    def active(self, lane: int) -> Iterator[None]:
        stream = self.lanes.compute(lane)
        self.fake.complete(stream)
        with self._memory.kernel(self._gpu_of[lane], stream) as tell:
            self._active = stream, tell
            try:
                yield
            finally:
                self._active = None

    def copy_beside(self, lane: int, pairs: Pairs, *, to_host: bool) -> End:
        gpu = self._gpu_of[lane]
        current, tell = self._active or (self._callers[gpu], lambda: None)
        tell()
        return self._beside.copy(gpu, current, pairs, to_host=to_host)

    def join_beside(self) -> None:
        self._beside.join(self._callers)

    def on_lane(self, lane: int, num_bytes: int) -> Tensor:
        # Memory freed after a step is used by later steps only, which the caller is behind.
        return self._persistent(num_bytes, self._callers[self._gpu_of[lane]])

    def pinned(self, num_bytes: int) -> Tensor:
        # The host may use it again at once, so it must have waited: this stream has nothing else.
        buffer = self._persistent(num_bytes, self.host)
        self.fake.place_on_host(buffer.data_ptr())
        return buffer

    def enable_peer(self, sender: int, receiver: int) -> None:
        """Does what torch does when it first copies from one GPU to the other."""
        self.fake.enable_peer(self._gpu_of[sender], self._gpu_of[receiver])

    def generators(self) -> list[int]:
        # The host's is the caller's as well, from which the seeds of steps are drawn.
        return []

    def give_back_cache(self) -> None:
        self.synchronize()

    def room(self, lane: int) -> tuple[int, int]:
        return 0, 1

    def pool(self) -> None:
        return None

    def synchronize(self) -> None:
        self._settle(None)
        if self.fake.synchronize():
            # Memory that nobody holds any more may come back as other memory.
            self._memory.begin()
            self._memory.end()

    def capture(self, lane: int, pool: None, run: Callable[[], list[Tensor]]) -> CapturedGraph:
        """A graph that computes again what `run` computes, and puts it where the first went."""
        self._memory.has_graphs = True
        watch = Unexecuted(self._memory, self.lanes.compute(lane))
        # A capture looks at no values; here they must be such that nothing objects to them.
        before = {storage: storage.clone() for storage in self._memory.lasting()}
        for storage in before:
            storage.fill_(0)
        try:
            with watch:
                results = run()
        finally:
            watch.undo()
            for storage, value in before.items():
                storage.copy_(value)
        there = {address for address, _ in watch.touched}
        # The others are in memory that is not the graph's, such as a parameter's.
        made = [place for place in results if place.untyped_storage().data_ptr() not in there]
        for result in made:
            self._memory.add(result.untyped_storage(), self.lanes.compute(lane), lasts=True)

        def replay() -> None:
            try:
                with torch.enable_grad():
                    again = run()
                with torch.no_grad():
                    for place, value in zip(results, again, strict=True):
                        if place.data_ptr() != value.data_ptr():
                            memory_of(place).copy_(memory_of(value))
            except Exception as error:
                self.errors.append(error)

        # Tensors that graphs of one slot hand to each other are not for others to see.
        reads = [place for place, written in watch.touched.items() if not written]
        writes = [place for place, written in watch.touched.items() if written]
        for result in made:
            memory: Any = result.untyped_storage()
            writes.append((memory.data_ptr(), memory.nbytes()))
            # Nothing has been computed yet.
            memory.fill_(0xFF)
        reads, writes = (list(filter(self._memory.lasts, places)) for places in (reads, writes))
        self._memory.use(self._gpu_of[lane], reads, writes)
        graph = self.fake.graph(replay, reads, writes, self.duration_ns)
        executable, owner = self.fake.instantiate(graph), _Owner()
        weakref.finalize(owner, self.fake.give_back, executable).atexit = False
        return CapturedGraph(owner, executable, graph)  # type: ignore[arg-type]

    def _persistent(self, num_bytes: int, stream: int) -> Tensor:
        # Memory must not look like a result before anything lands in it.
        with torch.utils._python_dispatch._disable_current_modes():
            buffer = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        self._memory.add(buffer.untyped_storage(), stream, lasts=True)
        return buffer


class _Owner:
    """Takes the place of torch's graph, which ends with it."""


class _Memory:
    """The tensors that the program holds, and how kernels change them."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        # Held here, so that no address comes back before the step is over.
        self._held: dict[int, Any] = {}
        self._freed: dict[int, Any] = {}
        # Addresses that stay from step to step: of rings, and of what graphs give out.
        self._lasting: set[int] = set()
        # By address: the GPU and the stream whose action has made it.
        self._makers: dict[int, tuple[int, int]] = {}
        # Tensors that are not the program's, such as the state of a generator. Held to the end:
        # nothing says when it goes, and its address must not come back as memory of another GPU,
        # whose lanes need not have waited for who read it.
        self._others: dict[int, Any] = {}
        # Callers fill, and read, what graphs use. Tensors that land for actions are theirs alone.
        self.has_graphs = False
        # By place: the GPUs that have used it, and the one that has written to it last.
        self._users: dict[Range, tuple[set[int], int | None]] = {}

    def lasting(self) -> list[Any]:
        return [self._held[address] for address in self._lasting]

    def lasts(self, place: Range) -> bool:
        return place[0] in self._lasting

    def add(
        self, storage: Any, stream: int, gpu: int | None = None, *, lasts: bool = False
    ) -> None:
        """Memory of a stream, which an action on that GPU has made where one is named."""
        address = storage.data_ptr()
        if lasts and address:
            self._lasting.add(address)
        if address and address not in self._held:
            self._held[address] = storage
            if gpu is not None:
                self._makers[address] = gpu, stream
            self._fake.alloc(address, storage.nbytes(), stream)

    def meet(self, storage: Any) -> None:
        """Keeps memory that has come from elsewhere."""
        if storage.data_ptr() not in self._held:
            self._others[storage.data_ptr()] = storage

    @contextmanager
    def kernel(self, gpu: int, stream: int) -> Iterator[Callable[[], None]]:
        """Work within it is a kernel, or several: `tell` ends one."""
        with Watch(self, stream, gpu) as watch:
            tell = partial(self._tell, watch, gpu, stream)
            yield tell
        tell()
        self._release(self._held)

    def _tell(self, watch: Watch, gpu: int, stream: int) -> None:
        reads = [place for place, written in watch.touched.items() if not written]
        writes = [place for place, written in watch.touched.items() if written]
        brought = [place for place in reads if self._makers.get(place[0], (gpu,))[0] != gpu]
        for place in brought:
            self._bring(place, stream)
        reads_here = [place for place in reads if place not in brought]
        self._fake.kernel(stream, reads_here, writes, HostGpus.duration_ns)
        self.use(gpu, reads, writes)
        watch.touched.clear()

    def use(self, gpu: int, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """Notes that a GPU touches these places: now, or whenever its graph is replayed."""
        for place in reads:
            users, writer = self._users.get(place, (set(), None))
            self._users[place] = users | {gpu}, writer
        for place in writes:
            users, _ = self._users.get(place, (set(), None))
            self._users[place] = users | {gpu}, gpu

    def begin(self) -> None:
        """Begins a step: whoever writes now may have been given what lasted until here."""
        self._release(self._lasting)

    def _bring(self, place: Range, stream: int) -> None:
        """The work of `to` between GPUs: a copy by the source's stream, which both wait for."""
        _, source = self._makers[place[0]]
        self._fake.order(stream, source)
        self._fake.kernel(source, reads=[place])
        self._fake.order(source, stream)

    def write_all(self, gpu: int, stream: int) -> None:
        """Writes to what only this GPU has used, and what the program still holds of it."""
        places = [place for place, (users, _) in self._users.items() if users == {gpu}]
        self._fake.kernel(stream, writes=[place for place in places if self._is_there(place)])

    def read_all(self, gpu: int, stream: int) -> None:
        """Reads what this GPU has written last."""
        places = [place for place, (_, writer) in self._users.items() if writer == gpu]
        self._fake.kernel(stream, reads=[place for place in places if self._is_there(place)])

    def end(self) -> None:
        """Ends a step: addresses may come back."""
        for address in self._freed:
            self._fake.forget(address)
        self._freed.clear()
        self._users = {place: use for place, use in self._users.items() if self._is_there(place)}

    def _is_there(self, place: Range) -> bool:
        return place[0] in self._held and (self.has_graphs or not self.lasts(place))

    def _release(self, addresses: Iterable[int]) -> None:
        """Tells of those storages that the program has let go of."""
        for address in list(addresses):
            # One use is the reference held here.
            if torch._C._storage_Use_Count(self._held[address]._cdata) == 1:
                self._fake.free(address)
                self._lasting.discard(address)
                self._freed[address] = self._held.pop(address)
                self._makers.pop(address, None)

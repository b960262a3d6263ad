"""Copies between fake GPUs and the host, on streams of their own.

Copies are there when somebody has waited: a wait that is missing leaves what was there.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pykern.runtime.gpu.cuda import Settle
from tests.fake_cuda.fake import FakeCuda, Range

Pairs = Sequence[tuple[Tensor, Tensor]]


class Beside:
    """The streams, by GPU and direction. `host` stands for what the host itself does."""

    def __init__(self, fake: FakeCuda, host: int, settle: Settle) -> None:
        self._settle = settle
        self._fake = fake
        self._host = host
        self._streams: dict[tuple[int, bool], int] = {}
        self._ends: list[End] = []

    def copy(self, gpu: int, current: int, pairs: Pairs, *, to_host: bool) -> "End":
        key = gpu, to_host
        if key not in self._streams:
            self._streams[key] = self._fake.stream(gpu)
        stream = self._streams[key]
        self._fake.complete(current)
        sources = [_range(source) for source, _ in pairs]
        if not to_host:
            self._fake.kernel(self._host, writes=sources)
        # Work of the host that is done by now stays done.
        for before in (current, self._host):
            self._fake.order(before, stream)
        self._fake.kernel(stream, sources, [_range(into) for _, into in pairs])
        with _disable_current_modes():
            taken = [(source.clone(), into) for source, into in pairs]
        end = End(self._fake, self._host, stream, taken, to_host, self._settle)
        self._ends.append(end)
        return end

    def join(self, callers: dict[int, int]) -> None:
        for (gpu, _), stream in self._streams.items():
            self._fake.order(stream, callers[gpu])
        for end in self._ends:
            end.arrive()
        self._ends.clear()


class End:
    """Takes the place of `HostMarks`."""

    def __init__(
        self,
        fake: FakeCuda,
        host: int,
        stream: int,
        taken: Pairs,
        to_host: bool,
        settle: Settle,
    ) -> None:
        self._fake, self._host, self._stream, self._settle = fake, host, stream, settle
        self._taken = list(taken)
        self._to_host = to_host

    def wait(self) -> None:
        """The host has waited, and reads what has come."""
        self._settle(lambda: self._fake.complete(self._stream))
        self._fake.complete(self._stream)
        self._fake.order(self._stream, self._host)
        if self._to_host:
            self._fake.kernel(self._host, reads=[_range(into) for _, into in self._taken])
        self.arrive()

    def arrive(self) -> None:
        with _disable_current_modes():
            for value, into in self._taken:
                into.copy_(value)
        self._taken.clear()


def _range(tensor: Tensor) -> Range:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()

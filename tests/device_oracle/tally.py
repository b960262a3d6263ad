"""Counts of what a process of the tier has seen, which it prints when it ends."""

import atexit
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pykern.runtime.gpu.streams import Streams
from tests.fake_cuda.fake import FakeCuda

CALLS = {
    "cuGraphLaunch": "graph launches",
    "cuMemcpyAsync": "copies",
    "cuEventRecord": "records of events",
    "cuStreamWaitEvent": "waits for events",
}

_calls: Counter[str] = Counter()


def add(fake: FakeCuda) -> None:
    """Adds the calls of a driver that ends."""
    _calls.update({text: fake.calls(name) for name, text in CALLS.items()})


def begin(captures: Callable[[], Sequence[tuple[str, int]]]) -> None:
    """Counts steps from here on, and prints all, with what the library counts, at the end."""
    run = Streams.run

    def counted(self: Streams, *args: Any, **kwargs: Any) -> Any:
        _calls["steps and forwards"] += 1
        return run(self, *args, **kwargs)

    setattr(Streams, "run", counted)  # noqa: B010 - as mypy wants it
    atexit.register(lambda: print(f"seen: {_text([*_calls.items(), *captures()])}"))


def _text(counts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{count:,} {text}" for text, count in counts)

"""Writers that are killed while they save, over and over; run as a program, it prints what it saw.

A writer is a fork of this process, which is small and has one thread. It is killed at a call of the
system, at a byte of the file, or at any time. After each of them the file must be one generation,
whole: the one before or the one that was being written, and this one if its `save` had returned.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pykern import checkpoint

# How the kernel and safetensors are called from Python.
_SYSTEM = ("posix", "fcntl", "safetensors._safetensors_rust")


def model_of(generation: int) -> nn.Module:
    model = nn.Module()
    for name, size in (("a", 10), ("b", 50_000), ("c", 1)):
        model.register_buffer(name, torch.full((size,), float(generation)))
    return model


class Killed:
    """A file, its generation, and what has happened to its writers."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "run.ckpt"
        self.generation = 0
        self.seen: Counter[str] = Counter()
        self.save(0)

    def save(self, generation: int) -> None:
        checkpoint.save(self.file, model_of(generation), extra=generation)

    def at_calls(self, stride: int) -> None:
        """Before and after every call of the system that a save makes, or each of so many."""
        point = 0
        while self._writer("call", self._kill_at_call(point)):
            point += stride

    def at_bytes(self, count: int) -> None:
        """When so many bytes of the file are written, and no more fit."""
        size = self.file.stat().st_size
        for index in range(count):
            assert self._writer("byte", self._limit(size * index // count))

    def at_times(self, count: int) -> None:
        """Some time after it began to save again and again."""
        begin = time.perf_counter()
        self.save(self.generation + 1)
        self.generation += 1
        few_saves = 4 * (time.perf_counter() - begin)
        for _ in range(count):
            assert self._writer("time", lambda: None, random.uniform(0.0, few_saves))

    def _kill_at_call(self, point: int) -> Callable[[], None]:
        left = point

        def notice(_frame: object, event: str, called: Any) -> None:
            nonlocal left
            named = getattr(called, "__module__", None) in _SYSTEM
            if event in ("c_call", "c_return") and named:
                if called is os._exit:
                    sys.setprofile(None)
                elif left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        return lambda: sys.setprofile(notice)

    @staticmethod
    def _limit(size: int) -> Callable[[], None]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

        return limit

    def _writer(self, kind: str, arm: Callable[[], None], after: float | None = None) -> bool:
        """Whether it was killed. With a time it saves until then, without one once."""
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self._write(arm, told, forever=after is not None)
            finally:
                os._exit(1)
        os.close(told)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        with os.fdopen(heard, "rb") as pipe:
            acknowledged = self.generation + len(pipe.read())
        _, status = os.waitpid(child, 0)
        self._check(kind, acknowledged)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed"
        return os.WIFSIGNALED(status)

    def _write(self, arm: Callable[[], None], told: int, *, forever: bool) -> None:
        generation = self.generation
        arm()
        while True:
            generation += 1
            self.save(generation)
            os.write(told, b".")
            if not forever:
                sys.setprofile(None)
                os._exit(0)

    def _check(self, kind: str, acknowledged: int) -> None:
        model = model_of(-1)
        found = checkpoint.load(self.file, model, rng=False)
        assert all((buffer == found).all() for buffer in model.buffers()), "half a file"
        assert acknowledged <= found <= acknowledged + 1, (acknowledged, found)
        self.seen[f"{kind}: {'old' if found == self.generation else 'new'}"] += 1
        self.seen["left behind"] += len([*self.file.parent.iterdir()]) > 1
        self.generation = found


def main(folder: str, stride: str, count_bytes: str, count_times: str) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    killed = Killed(Path(folder))
    killed.at_calls(int(stride))
    killed.at_bytes(int(count_bytes))
    killed.at_times(int(count_times))
    killed.save(killed.generation + 1)
    print(
        json.dumps({"seen": killed.seen, "files": [each.name for each in Path(folder).iterdir()]})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

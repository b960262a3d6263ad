"""Pipelines with a planted cause, which run: on CPU workers, or on GPUs by the driver's model.

Layers sleep where a plant is about times, since a busy machine lets sleepers sleep.
"""

import ctypes
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pykern import _C
from pykern.pipeline.pipeline import Pipeline
from pykern.plan import Kind
from pykern.profiling import Report
from pykern.runtime.gpu.streams import Streams
from pykern.runtime.stage.stage import Run, Stage
from tests.fake_cuda.host_gpus import HostGpus, host_gpus

MS = 1e6
SLEEP_S = 0.01
WIDTH = 4
# Python hashes so many without the interpreter lock.
BYTES = bytes(2**18)


def some_devices(random: Random) -> int:
    """Two workers or three, where there are cores for them."""
    return random.randint(2, 3) if len(os.sched_getaffinity(0)) > 2 else 2


class Slept(torch.autograd.Function):
    """The input, after a sleep; its backward sleeps twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeps(nn.Linear):
    """A layer that takes a known time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Slept.apply(super().forward(x), self.seconds)


class Spins(nn.Linear):
    """A layer that keeps a core busy, and lets other threads take the interpreter lock."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            hashlib.sha256(BYTES)
        return super().forward(x)


def profiled(
    layers: Sequence[nn.Module],
    microbatches: int,
    steps: int = 2,
    prepare: Callable[[Pipeline], None] = lambda _: None,
    **more: Any,
) -> Report:
    """The report on some steps, of one row in a microbatch."""
    x = torch.randn(microbatches, WIDTH)
    with Pipeline(
        nn.Sequential(*layers), microbatches=microbatches, loss_fn=mse_loss, **more
    ) as pipe:
        prepare(pipe)
        return pipe.profile(x, target=x, steps=steps)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    with _C.Undo(torch.set_num_threads, torch.get_num_threads()):
        torch.set_num_threads(count)
        yield


def imbalance(random: Random) -> Report:
    """One stage has layers that take far longer."""
    devices = some_devices(random)
    seconds = [SLEEP_S] * devices
    seconds[random.randrange(devices)] *= random.uniform(2.5, 5)
    with torch_threads(1):
        return profiled([*map(Sleeps, seconds)], 3 * devices, devices=f"cpu:{devices}")


def few_microbatches(random: Random) -> Report:
    """As many microbatches as stages, or fewer."""
    devices = some_devices(random)
    layers = [Sleeps(SLEEP_S) for _ in range(devices)]
    with torch_threads(1):
        return profiled(layers, random.randint(1, devices), devices=f"cpu:{devices}")


def slow_device(random: Random) -> Report:
    """A device takes longer for all that it does, whatever its layers are."""
    devices = some_devices(random)
    slow, seconds = random.randrange(devices), SLEEP_S * random.uniform(1.5, 4)

    def around(kind: Kind, stage: Stage, call: Run) -> Run:
        def run(microbatch: int) -> None:
            time.sleep(seconds if kind is Kind.F else 2 * seconds)
            call(microbatch)

        return run if stage.index == slow and kind in (Kind.F, Kind.B) else call

    layers = [Sleeps(SLEEP_S) for _ in range(devices)]
    with torch_threads(1):
        return profiled(
            layers,
            3 * devices,
            devices=f"cpu:{devices}",
            prepare=lambda pipe: pipe._executor.watch(around),
        )


def short_actions(random: Random) -> Report:
    """Layers of a few microseconds."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    with torch_threads(1):
        return profiled(layers, random.choice([16, 32, 64]), devices="cpu:2", steps=9)


class Competes(Sleeps):
    """A layer that takes longer where torch has more than one thread."""

    def forward(self, x: Tensor) -> Tensor:
        slower = 3 if torch.get_num_threads() > 1 else 1
        return Slept.apply(nn.Linear.forward(self, x), slower * self.seconds)


def competing_threads(random: Random) -> Report:
    """Threads of torch slow each other.

    Real ones do so by how much a busy machine lets them, so sleeps stand for what they lose.
    """
    layers = [Competes(SLEEP_S) for _ in range(2)]
    # Each worker gets half of them.
    with torch_threads(random.randint(4, 8)):
        return profiled(layers, random.randint(6, 10), devices="cpu:2")


def shared_cores(random: Random) -> Report:
    """Two or three workers, whose layers keep a core busy, on one core."""
    devices, cores = random.randint(2, 3), os.sched_getaffinity(0)
    with torch_threads(1), _C.Undo(os.sched_setaffinity, 0, cores):
        os.sched_setaffinity(0, {min(cores)})
        layers = [Spins(WIDTH, WIDTH) for _ in range(devices)]
        return profiled(layers, 8, devices=f"cpu:{devices}", steps=5)


class Timed(nn.Linear):
    """A layer whose kernel takes a known time on a GPU of the model."""

    def __init__(self, ns: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.ns = ns

    def forward(self, x: Tensor) -> Tensor:
        HostGpus.duration_ns = self.ns
        return Lasting.apply(super().forward(x), 2 * self.ns)


class Lasting(torch.autograd.Function):
    """The input; its backward says how long the kernel of the backward takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ns: float) -> Tensor:
        ctx.ns = ns
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        HostGpus.duration_ns = ctx.ns
        return gradient, None


def on_gpus(layers: Sequence[nn.Module], microbatches: int, copy_ns: float = 1000.0) -> Report:
    """The same by a model of the driver, on whose clock a copy takes so long."""
    with (
        host_gpus(len(layers)) as fake,
        _C.Undo(setattr, HostGpus, "duration_ns", HostGpus.duration_ns),
        _C.Undo(setattr, Reads, "gpus", None),
        pytest.MonkeyPatch.context() as patch,
    ):
        fake.set_copy_cost(copy_ns, 100.0)
        # Torch's debug mode for synchronisation, of which a layer warns in torch's place.
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
        return profiled(layers, microbatches, devices="cuda", prepare=Reads.note)


def slow_link(random: Random) -> Report:
    """Copies between GPUs take longer than the stages."""
    devices = random.randint(2, 3)
    layers = [Timed(MS) for _ in range(devices)]
    return on_gpus(layers, 3 * devices, copy_ns=random.uniform(3, 8) * MS)


class Reads(Timed):
    """A layer that reads a value: the host waits for its GPU's stream, and torch warns of it."""

    gpus: HostGpus | None = None

    @classmethod
    def note(cls, pipe: Pipeline) -> None:
        assert isinstance(pipe._executor.driver, Streams)
        gpus: Any = pipe._executor.driver.gpus
        cls.gpus = gpus

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.gpus is not None and self.gpus._active is not None:
            stream, tell = self.gpus._active
            tell()
            self.gpus.fake.call("cuStreamSynchronize", ctypes.c_void_p(stream))
            # The rest of the action is short.
            HostGpus.duration_ns = 1000.0
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return y if y.sum().item() < 1e9 else -y


def host_synchronisation(random: Random) -> Report:
    """A layer calls `.item()`."""
    devices = random.randint(2, 3)
    layers = [Timed(MS) for _ in range(devices)]
    layers[random.randrange(devices)] = Reads(MS)
    return on_gpus(layers, 12 * (devices - 1))


def imbalance_of_gpus(random: Random) -> Report:
    """One GPU has more to compute."""
    devices = random.randint(2, 3)
    times = [MS] * devices
    times[random.randrange(devices)] *= random.uniform(2.5, 5)
    return on_gpus([*map(Timed, times)], 3 * devices)


RUNNING: dict[str, tuple[str, Callable[[Random], Report]]] = {
    "imbalance": ("imbalance of stages", imbalance),
    "imbalance of GPUs": ("imbalance of stages", imbalance_of_gpus),
    "few microbatches": ("warm-up and cool-down", few_microbatches),
    "slow device": ("slow device", slow_device),
    "tiny stages": ("short actions", short_actions),
    "competing threads": ("competing threads", competing_threads),
    "shared cores": ("shared cores", shared_cores),
    "slow link": ("waiting for a copy", slow_link),
    "item": ("host synchronisation", host_synchronisation),
}

"""The program that is interrupted: see `sigints`."""

from __future__ import annotations

import faulthandler
import gc
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import checkpoint

from .sigints import SIGNALS, say

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

WIDTH, ROWS = 4, 6
_PATIENCE_S = 40.0
# So many callers say where an interrupt came.
_DEPTH = 6
_NAMED = re.compile(r"<(.+?)(?: object)? at 0x")


class Net(nn.Module):
    """Is recorded; has a dropout, a skip and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) + first


class Tied(nn.Module):
    """The last layer uses the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.layers.get_submodule("0").weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


class Slow(nn.Module):
    """Most interrupts arrive while it waits."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x


def chain() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, Slow(), nn.Linear(WIDTH, WIDTH))


class Subject:
    """Pipelines, what is done with them, and how it is seen that they are whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.x, self.y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        # Made here: an interrupt of torch's own initialisation of a layer may leave gradients off.
        self.chain, self.net = chain(), Net()
        self.pipes = {
            "steps": self.open(chain(), schedule="one_f_one_b"),
            "steps with split backwards": self.open(chain(), schedule="zb_h1"),
            "steps of replicas": self.open(chain(), replicas=2),
            "steps of a recorded model": self.open_recorded(Net()),
            "steps of tied stages": self.open_recorded(Tied()),
        }
        self.models = {name: pipe.state_dict() for name, pipe in self.pipes.items()}
        self.models = {
            name: {key: value.clone() for key, value in state.items()}
            for name, state in self.models.items()
        }
        self.optimizer = torch.optim.AdamW(self.pipes["steps"].parameters())
        checkpoint.save(folder / "run.ckpt", self.pipes["steps"], self.optimizer)
        self.expected = self.results()
        self.threads = threading.active_count()
        self.tasks = tasks()
        self.call = nn.Module.__call__

    def open(self, model: nn.Module, **options: object) -> pykern.Pipeline:
        options = {"microbatches": 4, "devices": "cpu:2", **options}
        return pykern.Pipeline(model, loss_fn=F.mse_loss, **options)  # type: ignore[arg-type]

    def open_recorded(self, model: nn.Module) -> pykern.Pipeline:
        return self.open(model, microbatches=2, sample=self.x[:3])

    def activities(self) -> dict[str, Callable[[], object]]:
        """The activities that are interrupted."""
        steps = {name: lambda pipe=pipe: self.step(pipe) for name, pipe in self.pipes.items()}
        return {
            **steps,
            "a stream": self.stream,
            "a stream that is left": self.leave_stream,
            "recording": lambda: self.open_recorded(self.net).close(),
            "construction": lambda: self.open(self.chain).close(),
            "saving": lambda: checkpoint.save(
                self.folder / "run.ckpt", self.pipes["steps"], self.optimizer
            ),
            "loading": lambda: checkpoint.load(
                self.folder / "run.ckpt", self.pipes["steps"], self.optimizer
            ),
        }

    def step(self, pipe: pykern.Pipeline) -> Tensor:
        return pipe.step(self.x, target=self.y)

    def stream(self) -> list[Tensor]:
        pipe = self.pipes["steps of a recorded model"]
        return list(pipe.stream(self.x[:rows] for rows in (6, 5, 6, 4, 6)))

    def leave_stream(self) -> None:
        for _ in self.pipes["steps of a recorded model"].stream([self.x] * 4):
            break

    def results(self) -> list[Tensor]:
        """All that the next step of each makes, from the state at the beginning."""
        found = []
        for name, pipe in self.pipes.items():
            pipe.load_state_dict(self.models[name])
            pipe.train()
            pipe.zero_grad()
            torch.manual_seed(1)
            found.append(self.step(pipe))
            found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
            found += [buffer.clone() for buffer in pipe.buffers()]
            found.append(torch.get_rng_state())
        pipe = self.pipes["steps of a recorded model"].eval()
        found += self.stream()
        pipe.train()
        return found

    def wrong(self) -> str:
        """The state that has changed; empty if the state is unchanged."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return "gradients are off"
        if nn.Module.__call__ is not self.call:
            return "modules are still recorded"
        found = self.results()
        if len(found) != len(self.expected):
            return f"{len(found)} results for {len(self.expected)}"
        pairs = zip(found, self.expected, strict=True)
        differ = [i for i, pair in enumerate(pairs) if not torch.equal(*pair)]
        if differ:
            return f"results {differ} of {len(found)} differ"
        try:
            checkpoint.load(self.folder / "run.ckpt", self.pipes["steps"], self.optimizer)
        except ValueError as error:
            return f"the checkpoint is damaged: {error}"
        with self.open_recorded(Net()) as pipe:
            self.step(pipe)
        return self.left()

    def left(self) -> str:
        """Threads that a pipeline has left. Those that end are given the time for it."""
        for _ in range(200):
            if tasks() <= self.tasks:
                return ""
            # Objects that an exception has held may be in a cycle.
            gc.collect()
            time.sleep(0.01)
        return f"{tasks()} threads where there were {self.tasks}"


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


class Arrival:
    """The handler of SIGINT. It raises KeyboardInterrupt as Python's own does, and keeps where."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.ignored = ""

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        while frame is not None and len(self.places) < _DEPTH:
            code = frame.f_code
            self.places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        raise KeyboardInterrupt

    def ignore(self, unraisable: UnraisableHookArgs) -> None:
        """Python tells of an exception in a finalizer, which it raises to nobody."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # From Python 3.14 on the object is named in the message alone.
            text = f"{unraisable.err_msg} {unraisable.object!r}"
            named = _NAMED.search(text)
            self.ignored = named[1] if named else text

    def lost(self) -> str:
        """Says why an interrupt that has arrived was not raised."""
        if self.ignored:
            return f"swallowed by Python in a finalizer: {self.ignored}"
        return f"it was lost at {' < '.join(self.places)}"


def until_interrupted(act: Callable[[], object], arrival: Arrival) -> str:
    """Does it again and again."""
    begin = time.monotonic()
    while time.monotonic() - begin < _PATIENCE_S:
        act()
        if arrival.places:
            return arrival.lost()
    return "it did not arrive"


def interrupted(name: str, act: Callable[[], object], arrival: Arrival) -> str:
    """The outcome of an interrupted activity; a late interrupt afterwards is ignored."""
    sys.unraisablehook = arrival.ignore
    signal.signal(signal.SIGINT, arrival)
    try:
        try:
            say(f"begin {name}")
            outcome = until_interrupted(act, arrival)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        outcome = "right"
    except BaseException as error:
        outcome = f"wrong: {name} raised {error!r}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return outcome


def main(folder: str, seed: str, number: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(f"{seed} {number} child")
    subject = Subject(Path(folder))
    activities = subject.activities()
    for _ in range(SIGNALS):
        name = rng.choice(list(activities))
        arrival = Arrival()
        outcome = interrupted(name, activities[name], arrival)
        try:
            wrong = subject.wrong()
        except BaseException as error:
            wrong = repr(error)
        where = " < ".join(arrival.places)
        say(f"wrong after {name}: {wrong}; interrupted at {where}" if wrong else outcome)
    say("end")


if __name__ == "__main__":
    main(*sys.argv[1:])

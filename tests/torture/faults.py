"""A fault at every action of small plans, by exceptions of every kind."""

import asyncio
import copy
import errno
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Plan
from tests.runtime.plans import recomputed, split_backward, split_some, two_replicas
from tests.runtime.test_faults import Fuse
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

from .campaign import Campaign

_MICROBATCHES, _ROWS, _WIDTH = 4, 7, 6


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses notes, which are an attribute."""

    code: int = 3


def _refuses(method: str) -> type[Exception]:
    def refuse(*_: object) -> NoReturn:
        raise ArithmeticError(f"{method} is refused")

    return type(f"Refuses{method}", (Exception,), {method: refuse})


class FullDisk(OSError):
    """Has attributes of its own."""


def _with_notes(notes: object) -> Exception:
    error = ValueError("planted")
    error.__notes__ = notes  # type: ignore[assignment]
    return error


# Each gives an error, and says whether a note can be put on it.
KINDS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "ValueError": (lambda: ValueError("planted"), True),
    "StopIteration": (lambda: StopIteration(3), True),
    "StopAsyncIteration": (lambda: StopAsyncIteration(3), True),
    "GeneratorExit": (GeneratorExit, True),
    "SystemExit": (lambda: SystemExit(3), True),
    "KeyboardInterrupt": (KeyboardInterrupt, True),
    "CancelledError": (asyncio.CancelledError, True),
    "MemoryError": (MemoryError, True),
    "RecursionError": (lambda: RecursionError("planted"), True),
    "torch.OutOfMemoryError": (lambda: torch.OutOfMemoryError("planted"), True),
    "a subclass of OSError": (lambda: FullDisk(errno.ENOSPC, "planted", "file"), True),
    "UnicodeDecodeError": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "planted"), True),
    "ExceptionGroup": (lambda: ExceptionGroup("planted", [KeyError("inner")]), True),
    "BaseExceptionGroup": (lambda: BaseExceptionGroup("planted", [SystemExit(3)]), True),
    "a frozen dataclass": (Frozen, False),
    "repr raises": (_refuses("__repr__"), True),
    "str raises": (_refuses("__str__"), True),
    "eq raises": (_refuses("__eq__"), True),
    "bool raises": (_refuses("__bool__"), True),
    "add_note raises": (_refuses("add_note"), False),
    "setattr raises": (_refuses("__setattr__"), False),
    "notes are a tuple": (lambda: _with_notes(("mine",)), False),
    "notes of its own": (lambda: _with_notes(["mine"]), True),
}

PLANS: dict[str, Plan] = {
    "one_f_one_b": schedules.one_f_one_b(3, _MICROBATCHES),
    "hanayo": schedules.hanayo(2, _MICROBATCHES, waves=1),
    "recomputed": recomputed(split_some(schedules.one_f_one_b(2, _MICROBATCHES))),
    "split": split_backward(schedules.one_f_one_b(3, _MICROBATCHES), delay=2),
    "replicas": split_backward(two_replicas(2, _MICROBATCHES)),
}


@dataclass(frozen=True)
class Subject:
    """A pipeline, its fuses, and what its next step has to give."""

    pipe: pykern.Pipeline
    layers: nn.Sequential
    plain: nn.Sequential
    batch: tuple[Tensor, Tensor]
    loss: Tensor
    output: Tensor

    def fuse_of(self, action: Action) -> Fuse:
        layer = self.layers[self.pipe.partition.stages[action.stage][0]]
        assert isinstance(layer, Fuse)
        return layer

    def require_whole(self) -> None:
        """Nothing of a step is left, and the next has every bit."""
        if self._num_alive():
            gc.collect()
        assert self._num_alive() == 0, "tensors are left"
        self.pipe.zero_grad()
        x, y = self.batch
        assert torch.equal(self.pipe.step(x, target=y), self.loss), "the next loss"
        assert_same_state(self.pipe, self.plain)
        assert torch.is_grad_enabled()

    def _num_alive(self) -> int:
        return sum(len(layer.alive) for layer in self.layers if isinstance(layer, Fuse))


_opened: list[pykern.Pipeline] = []


@cache
def _subject(name: str) -> Subject:
    torch.manual_seed(0)
    plan = PLANS[name]
    layers = nn.Sequential(*(Fuse() for _ in range(plan.num_stages)))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)
    replicas = plan.placement.num_replicas
    loss = plain_step(plain, x, y, F.mse_loss, _MICROBATCHES, num_replicas=replicas)
    pipe = pykern.Pipeline(
        layers, devices=f"cpu:{plan.num_devices}", schedule=plan, loss_fn=F.mse_loss
    )
    _opened.append(pipe)
    pipe.step(x, target=y)
    with torch.no_grad():
        return Subject(pipe, layers, plain, (x, y), loss, pipe(x))


@contextmanager
def _closing() -> Iterator[None]:
    """The pipelines of a run end with it."""
    try:
        yield
    finally:
        _subject.cache_clear()
        while _opened:
            _opened.pop().close()


@cache
def _all() -> list[tuple[str, Action, str, str]]:
    """Every plan, action, kind of exception, and what runs it: a step, a call without gradients, a
    stream, or a call with a loss outside and its backward."""
    found = []
    for name, plan in PLANS.items():
        actions = [action for row in plan.rows for action in row]
        if plan.placement.num_replicas > 1:
            actions += [Action(Kind.REDUCE, stage, 0) for stage in range(plan.num_stages)]
        # The first stage has no inputs to give gradients to: its I has nothing to do.
        actions = [a for a in actions if a.kind is not Kind.I or a.stage > 0]
        for action, kind in product(actions, KINDS):
            ways = ["step"] if action.kind is not Kind.F else ["step", "call", "stream"]
            if plan.placement.num_replicas == 1:
                ways.append("outside")
            found += [(name, action, kind, way) for way in ways]
    return found


def cases(seed: int, number: int) -> Iterator[str]:
    """One fault. In which order they come, the seed says."""
    everything = _all()
    # Odd, and prime to any count here: each comes once, those of one plan far from each other.
    name, action, kind, way = everything[(number * 7919 + seed) % len(everything)]
    subject = _subject(name)
    threads = threading.active_count()
    make, takes_notes = KINDS[kind]
    error = make()
    arrived = _failed(subject, action, error, way)
    if way == "stream" and isinstance(error, StopIteration):
        # Out of an iterator it would be the end.
        arrived = arrived.__cause__ if arrived is not error else arrived
    assert arrived is error, f"{name} {action} {kind} {way}: {type(arrived)}"
    if takes_notes:
        _require_note(subject, action, error, way)
    # The traceback holds the frames that hold the tensors of the failed action.
    error.with_traceback(None)
    del arrived
    subject.require_whole()
    assert threading.active_count() <= threads
    yield "faults"
    yield f"faults in {way}"
    yield f"faults by {kind}"


def _failed(subject: Subject, action: Action, error: BaseException, way: str) -> Any:
    """The exception that reaches the caller when the action raises the error."""
    fuse, num_replicas = subject.fuse_of(action), subject.pipe.plan.placement.num_replicas
    # A reduction is the first accumulation after those of the first replica's microbatches.
    reduces = action.kind is Kind.REDUCE
    call = (_MICROBATCHES if reduces else action.microbatch) // num_replicas
    fuse.arm(action.kind, call, error, replica=action.microbatch % num_replicas > 0)
    x, y = subject.batch
    try:
        if way == "step":
            subject.pipe.step(x, target=y)
        elif way == "outside":
            F.mse_loss(subject.pipe(x), y).backward()
        elif way == "call":
            with torch.no_grad():
                subject.pipe(x)
        else:
            list(subject.pipe.stream([x, x]))
    except BaseException as found:
        return found
    finally:
        fuse.disarm()
    return None


def _require_note(subject: Subject, action: Action, error: BaseException, way: str) -> None:
    notes = [note for note in error.__notes__ if note.startswith("pykern: ")]
    place = (
        f"stage {action.stage}, microbatch {action.microbatch}, action {action}, "
        f"device {subject.pipe.plan.device_of(action)}"
    )
    if way == "stream":
        notes = [note for note in notes if " of the stream" not in note]
    assert len(notes) == 1, notes
    assert place in notes[0], (place, notes)


CAMPAIGN = Campaign(
    promise=(
        "An exception of any kind in any action reaches the caller as the same object. If the "
        "exception accepts notes, a note names the place. The next step is bitwise equal to a step "
        "without the exception."
    ),
    case=cases,
    total=len(_all()),
    around=_closing,
)

"""The steps of a recording, with their actions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..plan import Action, Kind


def action_of(text: str, kind: str, stage: int, microbatch: int) -> Action:
    """The action that the text of a range names by its kind, stage and microbatch.

    Raises:
        ValueError: there is no such action.
    """
    try:
        return Action(Kind[kind], stage, microbatch)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the recording must name the actions that pykern has, got {text!r}. Record it anew"
        ) from error


@dataclass(slots=True)
class Recorded:
    """An action or a copy of a step, as the thread saw it that ran or issued it.

    Attributes:
        action: the action, or the copy.
        device: its device; the sender of a copy.
        start_ns: when the thread began.
        end_ns: when the thread was through.
        thread: the thread's number or name, of any kind.
        works_ns: start and end of each kernel, copy and fill that it issued to GPUs.
    """

    action: Action
    device: int
    start_ns: int
    end_ns: int
    thread: Hashable
    works_ns: list[tuple[int, int]] = field(default_factory=list)

    @property
    def gpu_ns(self) -> tuple[int, int] | None:
        """Start and end of all work that it issued to GPUs; None if it issued nothing."""
        if not self.works_ns:
            return None
        return min(start for start, _ in self.works_ns), max(end for _, end in self.works_ns)


@dataclass(slots=True)
class RecordedStep:
    """A step of a recording.

    Attributes:
        process: the number of its process.
        start_ns: when its caller began.
        end_ns: when its caller went on.
        ran: its actions and copies.
    """

    process: int
    start_ns: int
    end_ns: int
    ran: list[Recorded] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuWork:
    """A kernel, a copy or a fill on a GPU.

    Attributes:
        process: the number of the process that issued it.
        thread: the thread that issued it, as in `Recorded`.
        called_ns: when the call began that issued it.
        start_ns: when it began on the GPU.
        end_ns: when it ended there.
    """

    process: int
    thread: Hashable
    called_ns: int
    start_ns: int
    end_ns: int


_Spanned = TypeVar("_Spanned", Recorded, RecordedStep)


class StepsByTime:
    """Steps, found by a process and a time.

    Args:
        steps: of a recording, in any order.

    Attributes:
        steps: the same, by their starts.

    Raises:
        ValueError: steps of a process overlap, and nothing tells whose an action is.
    """

    def __init__(self, steps: Iterable[RecordedStep]) -> None:
        self.steps = sorted(steps, key=lambda step: step.start_ns)
        self._of_process: dict[int, list[RecordedStep]] = {}
        for step in self.steps:
            before = self._of_process.setdefault(step.process, [])
            if before and step.start_ns < before[-1].end_ns:
                raise ValueError(
                    "steps of a process must follow each other, got some at once, in several "
                    "threads. Record one pipeline alone"
                )
            before.append(step)

    def at(self, process: int, ns: int) -> RecordedStep | None:
        """The step of a process at a time, if any."""
        return _at(self._of_process.get(process, ()), ns)

    def add_gpu_work(self, issued: Iterable[GpuWork]) -> None:
        """Notes the work on GPUs of each action and copy that issued any.

        The thread and the time of a call tell its action, since a thread is in one at a time. Where
        one thread issues all actions, autograd's threads may issue for it while it waits, and the
        time alone tells.
        """
        by_thread: dict[Hashable, list[Recorded]] = {}
        for process, steps in self._of_process.items():
            for one in (one for step in steps for one in step.ran):
                by_thread.setdefault(process, []).append(one)
                by_thread.setdefault((process, one.thread), []).append(one)
        for ran in by_thread.values():
            ran.sort(key=lambda one: one.start_ns)
        for work in issued:
            places = (work.process, work.thread), work.process
            found = (_at(by_thread.get(place, ()), work.called_ns) for place in places)
            owner = next(filter(None, found), None)
            if owner is not None:
                owner.works_ns.append((work.start_ns, work.end_ns))


def _at(spans: Sequence[_Spanned], ns: int) -> _Spanned | None:
    """Among spans by their starts, which do not overlap, the one of a time; None for a gap."""
    number = bisect_right(spans, ns, key=lambda one: one.start_ns) - 1
    return spans[number] if number >= 0 and ns <= spans[number].end_ns else None

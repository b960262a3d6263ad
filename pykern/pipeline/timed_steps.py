"""Steps of a pipeline for a profile, with what the kernel and the runtime tell of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch

from ..modes import torch_threads
from ..plan import Costs, Timeline
from ..profiling.hidden import hidden_share
from ..profiling.mean_costs import spans_of
from ..profiling.stage_costs import median_costs
from .steps import Steps

# Steps that warm up.
WARMUPS = 2


@dataclass(frozen=True)
class TimedStep:
    """A step that ran: its times, those of threads on cores and without one, and what ran when."""

    took_ns: int
    cores_ns: int
    waited_ns: int
    timeline: Timeline
    copies: Timeline
    costs: Costs

    @property
    def busy_ns(self) -> float:
        """The time of all actions."""
        return sum(map(self.timeline.busy_ns, range(self.timeline.num_devices)))


def timed_steps(
    pipe: Steps, step: Callable[[], None], num_steps: int, *, competing: bool
) -> tuple[list[TimedStep], list[TimedStep]]:
    """Steps, and as many with one torch thread if torch's threads compete, in turn."""
    threads = torch.get_num_threads()
    as_is: list[TimedStep] = []
    alone: list[TimedStep] = []
    for number in range(WARMUPS + num_steps):
        for ran, count in ((as_is, threads), (alone, 1))[: 1 + competing]:
            with torch_threads(count), pipe.tracing():
                before = _waited_ns(), time.process_time_ns(), time.perf_counter_ns()
                step()
                took_ns = time.perf_counter_ns() - before[2]
                cores_ns = time.process_time_ns() - before[1]
                waited_ns = _waited_ns() - before[0]
            if number >= WARMUPS:
                seen = pipe.timeline(), pipe.copies(), pipe.costs()
                ran.append(TimedStep(took_ns, cores_ns, waited_ns, *seen))
    return as_is, alone


def middle(ran: Sequence[TimedStep]) -> Timeline:
    """The step of median length."""
    timelines = sorted((one.timeline for one in ran), key=lambda one: one.makespan_ns)
    return timelines[(len(ran) - 1) // 2]


def costs_of(ran: Sequence[TimedStep], num_stages: int) -> Costs:
    """The costs of the stages, each the median over the steps."""
    return median_costs([one.costs for one in ran], num_stages)


def hidden(ran: Sequence[TimedStep]) -> float | None:
    """The part of copies beside which some device works, the lower median over the steps."""
    found = (hidden_share(list(spans_of(one.copies)), spans_of(one.timeline)) for one in ran)
    known = [share for share in found if share is not None]
    return median_low(known) if known else None


def core_share(ran: Sequence[TimedStep]) -> float:
    """The part of its time that a thread with work had a core; 1 if Linux does not tell."""
    busy_ns = sum(one.busy_ns for one in ran)
    cores_ns = sum(one.cores_ns for one in ran)
    waited_ns = max(sum(one.waited_ns for one in ran), 0)
    # Actions may sleep, which takes no core, and threads also wait between actions.
    there_ns = max(cores_ns, busy_ns - waited_ns)
    return there_ns / (there_ns + waited_ns) if there_ns else 1.0


def _waited_ns() -> int:
    """The time that the threads of this process have been ready to run, without a core."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile, and some kernels do not count.
        with suppress(OSError, IndexError):
            total += int((thread / "schedstat").read_text().split()[1])
    return total

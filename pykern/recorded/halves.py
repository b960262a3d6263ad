"""Steps whose backward autograd has asked for: a run of forwards, and another run."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Kind
from .steps import Recorded, RecordedStep

_FORWARD = {Kind.F, Kind.COPY_F}


def joined(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Each backward through an output with its forward, without the time between them.

    Args:
        steps: of a recording, by their starts. A run of forwards without a backward stays alone.
    """
    found: list[RecordedStep] = []
    for step in steps:
        before = found[-1] if found else None
        if before is not None and _is_half(before, step):
            found[-1] = _one(before, step)
        else:
            found.append(step)
    return found


def _is_half(forward: RecordedStep, backward: RecordedStep) -> bool:
    kinds = {ran.action.kind for ran in forward.ran}
    return (
        forward.process == backward.process
        and Kind.F in kinds
        and kinds <= _FORWARD
        and Kind.F not in {ran.action.kind for ran in backward.ran}
        and _cells(forward) == _cells(backward)
    )


def _cells(step: RecordedStep) -> set[tuple[int, int, int]]:
    """The stages and microbatches of its forwards, or of its backwards to inputs."""
    return {
        (ran.device, ran.action.stage, ran.action.microbatch)
        for ran in step.ran
        if ran.action.kind in (Kind.F, Kind.B, Kind.I)
    }


def _one(forward: RecordedStep, backward: RecordedStep) -> RecordedStep:
    gap = min(ran.start_ns for ran in backward.ran) - max(ran.end_ns for ran in forward.ran)
    ends = [ran.gpu_ns[1] for ran in forward.ran if ran.gpu_ns]
    starts = [ran.gpu_ns[0] for ran in backward.ran if ran.gpu_ns]
    gpu_gap = min(starts) - max(ends) if starts and ends else 0
    moved = [_earlier(ran, gap, gpu_gap) for ran in backward.ran]
    end = backward.end_ns - gap
    return RecordedStep(forward.process, forward.start_ns, end, [*forward.ran, *moved])


def _earlier(ran: Recorded, gap: int, gpu_gap: int) -> Recorded:
    works = [(start - gpu_gap, end - gpu_gap) for start, end in ran.works_ns]
    start, end = ran.start_ns - gap, ran.end_ns - gap
    return Recorded(ran.action, ran.device, start, end, ran.thread, works)

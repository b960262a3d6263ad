"""The sums of one step: of each stage's own gradients, and of those that stages share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...plan import Kind, Span, Timeline
from ...runtime.stage.stage import Stage
from .buckets import GradientSum
from .shares import Owners


@dataclass(frozen=True)
class StepSums:
    """The sums of one step.

    Attributes:
        of_stage: by stage, the sum for the parameters that only this stage uses.
        shared: the sums for parameters that several stages use, complete when the step has ended.
    """

    of_stage: Mapping[int, GradientSum]
    shared: Sequence[GradientSum]

    def __iter__(self) -> Iterator[GradientSum]:
        yield from self.of_stage.values()
        yield from self.shared

    def timeline(self, step: Timeline) -> Timeline:
        """The spans of the stages' all-reduces, in the time of the step's timeline."""
        rows = [
            [
                self._span(span)
                for span in row
                if span.action.kind is Kind.REDUCE and self.of_stage[span.action.stage].pending
            ]
            for row in step.rows
        ]
        return Timeline(rows if any(rows) else [])

    def _span(self, launch: Span) -> Span:
        pending = self.of_stage[launch.action.stage].pending
        took = max(one.end_ns for one in pending) - pending[0].start_ns
        return Span(launch.action, launch.start_ns, launch.start_ns + took)


def sums_of(
    stages: Sequence[Stage],
    groups: Sequence[ProcessGroup],
    shared_by: ProcessGroup | None,
    owners: Owners,
) -> StepSums:
    """The sums of the next step.

    Args:
        stages: the stages of the first replica.
        groups: the process groups, by stage.
        shared_by: the group for parameters that stages share; None not to sum their gradients.
        owners: the owner of each gradient's sum.

    Raises:
        RuntimeError: a parameter trains, but has no owner.
    """
    trained = [
        dict.fromkeys(p for layer in s.originals for p in layer.parameters() if p.requires_grad)
        for s in stages
    ]
    uses = Counter(parameter for of_stage in trained for parameter in of_stage)
    of_stage = {
        stage.index: owners.sum_of([one for one in parameters if uses[one] == 1], group)
        for stage, group, parameters in zip(stages, groups, trained, strict=True)
    }
    if shared_by is None:
        return StepSums(of_stage, [])
    shared: dict[torch.device, list[Tensor]] = {}
    for parameter, count in uses.items():
        if count > 1:
            shared.setdefault(parameter.device, []).append(parameter)
    return StepSums(of_stage, [owners.sum_of(each, shared_by) for each in shared.values()])

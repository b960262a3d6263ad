"""pipeline(): a model with a forward of its own, recorded on a microbatch and cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...modes import as_before
from ...partition.split_points import counts_at
from ...tensors.trees import Call
from ...trace import Traced, Untouched
from .recorded import FirstRecordedStage, RecordedStage
from .stage import PipelineStage


@dataclass(frozen=True)
class PipeInfo:
    """What a stage has to know of its pipe.

    Attributes:
        num_stages: how many there are.
        has_loss_and_backward: False: the loss is the schedule's.
    """

    num_stages: int
    has_loss_and_backward: bool = False


class Pipe(nn.Module):
    """A model in stages. Called, it runs them one after another, as the model would.

    Attributes:
        num_stages: how many there are.
    """

    def __init__(self, stages: Sequence[RecordedStage]) -> None:
        super().__init__()
        self.num_stages = len(stages)
        self.stages = nn.ModuleList(stages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        first, *others = self.stages
        value = first(*args, **kwargs)
        for stage in others:
            value = stage(value)
        return value

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """A stage's module.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"stage_idx is {stage_idx}; stages are 0 to {self.num_stages - 1}")
        return self.stages[stage_idx]

    def info(self) -> PipeInfo:
        """What `build_stage` needs beside the module."""
        return PipeInfo(self.num_stages)

    def build_stage(
        self, stage_index: int, device: torch.device, group: Any = None
    ) -> PipelineStage:
        """A stage for a schedule: see `PipelineStage`."""
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), device, group)


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: PipeInfo,
    device: torch.device,
    group: Any = None,
) -> PipelineStage:
    """A stage for a schedule, of a module of a `Pipe`: see `PipelineStage`."""
    return PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[..., Any] | None = None,
) -> Pipe:
    """Cuts a model with a forward of its own into stages; parameters stay the same objects.

    The forward is recorded, not exported: other shapes and modes are recorded when they first
    come, and a parameter is never copied. See `pykern.trace.Traced`.

    Args:
        module: the model, on the CPU.
        mb_args: positional arguments of one microbatch.
        mb_kwargs: keyword arguments of one microbatch.
        split_spec: names of modules before or behind which a stage ends, in the order of the
            forward; None where the forward calls `pipe_split`, which cuts before the module that
            it calls next.
        split_policy: None; there is no graph that it could change.

    Raises:
        ValueError: both are given, or `split_policy` is; or the model cannot be cut there (a
            `CutError` then says why).
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError("split_spec and split_policy both say where to cut; give one of them")
    if split_policy is not None:
        raise ValueError("split_policy changes a torch.fx graph, and here is none: use split_spec")
    call = tuple(mb_args), dict(mb_kwargs or {})
    split_at: Mapping[str, Any] = _marks_in(module, call) if split_spec is None else split_spec
    num_stages = len(split_at) + 1
    traced = Traced(module, call, num_stages, list(split_at))
    counts = counts_at(list(traced.segments), split_at, num_stages)
    spans = [range(start, end) for start, end in pairwise([0, *accumulate(counts)])]
    traced.cut(spans, [torch.device("cpu")] * num_stages, _nowhere)
    segments = list(traced.segments.values())
    first, *others = (segments[span.start : span.stop] for span in spans)
    return Pipe([FirstRecordedStage(first, traced), *map(RecordedStage, others)])


def _nowhere(low: int, high: int, with_gradients: bool) -> bool:
    """Stages give what they have to the next one, as torch's do."""
    del low, high, with_gradients
    return False


def _marks_in(module: nn.Module, call: Call) -> dict[str, SplitPoint]:
    """The modules before whose calls the forward says `pipe_split`."""
    marks = _Marks(module)
    with Untouched(module, ()).kept(), as_before(), _C.Undo(marks.leave), torch.no_grad(), marks:
        marks.handle = register_module_forward_pre_hook(marks.enter_module)
        module(*call[0], **call[1])
    if marks.pending:
        raise ValueError("pipe_split is called after the last module; there is nothing to cut off")
    return dict.fromkeys(marks.found, SplitPoint.BEGINNING)


class _Marks(TorchFunctionMode):
    """Records `pipe_split` and the calls of modules.

    Attributes:
        found: the names of the first modules called after each `pipe_split`.
        pending: whether a module call has yet to follow the last `pipe_split`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._name_of = {module: name for name, module in module.named_modules()}
        self._called: set[str] = set()
        self.found: list[str] = []
        self.pending = False
        # The handle of the global hook that reports modules.
        self.handle: RemovableHandle | None = None

    def leave(self) -> None:
        """Ends the reports of modules."""
        # An interrupt may come before the handle is set: then no name is found any more.
        self._name_of = {}
        if self.handle is not None:
            self.handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pending |= func is torch.ops.pippy._pipe_split
        return func(*args, **(kwargs or {}))

    def enter_module(self, module: nn.Module, _: Any) -> None:
        """A module is called."""
        name = self._name_of.get(module)
        if name is None:
            return
        if self.pending and name in self._called:
            raise ValueError(
                f"pipe_split comes before a call of {name!r}, which has been called before: cut "
                "before a module that is called once"
            )
        if self.pending:
            self.found.append(name)
        self.pending = False
        self._called.add(name)


__all__ = [
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "build_stage",
    "pipe_split",
    "pipeline",
]

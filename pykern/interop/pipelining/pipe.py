"""pipeline(): a model with a forward of its own, recorded on a microbatch and cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ... import _C
from ...modes import as_before
from ...partition.layers import refuse_lazy
from ...partition.split_points import is_end
from ...tensors.trees import Call, flatten
from ...trace import Marked, Marks, Untouched, is_list
from ...trace.opened import require_module
from ...user_code import warn
from .recorded import AllNames, FirstRecordedStage, Following, RecordedStage
from .stage import PipelineStage


@dataclass(frozen=True)
class PipeInfo:
    """Facts of the pipe that its stages need.

    Attributes:
        num_stages: how many there are.
        has_loss_and_backward: False: the loss is the schedule's.
    """

    num_stages: int
    has_loss_and_backward: bool = False


class Pipe(Following):
    """A model in stages. Called, it runs them one after another in the caller's thread.

    Names of parameters are torch's: `split_gm.submod_pp_<stage>.<name in the model>`.

    Attributes:
        num_stages: how many there are.
    """

    def __init__(self, stages: Sequence[RecordedStage]) -> None:
        super().__init__()
        self.num_stages = len(stages)
        self.split_gm = nn.Module()
        self._stages = tuple(stages)
        for index, stage in enumerate(stages):
            self.split_gm.add_module(f"submod_pp_{index}", stage)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The leaves of what the model returns, a tuple also where it returns a tensor alone."""
        first, *others = self._stages
        value = first(*args, **kwargs)
        for stage in others:
            value = stage(value)
        return tuple(flatten(value)[0])

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """A stage's module.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"stage_idx must be 0 to {self.num_stages - 1}, got {stage_idx}")
        return self._stages[stage_idx]

    def info(self) -> PipeInfo:
        """The argument of `build_stage` beside the module."""
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
    come, and a parameter is never copied. See `pykern.trace.Traced`. Between two places where it is
    cut there is a stage only if the forward does something there; stages are numbered without gaps.

    Args:
        module: the model, on the CPU.
        mb_args: positional arguments of one microbatch.
        mb_kwargs: keyword arguments of one microbatch.
        split_spec: names of modules before or behind whose calls a stage ends, in any order. A
            stage ends where the forward calls `pipe_split` as well.
        split_policy: None; there is no graph that it could change.

    Raises:
        ValueError: both are given, or `split_policy` is; or the model cannot be cut there (a
            `CutError` then says why).
    """
    if split_spec is not None and split_policy is not None:
        raise ValueError("split_spec must be None beside split_policy, got both. Give one of them")
    if split_policy is not None:
        raise ValueError(
            "split_policy must be None, got a function. It changes a torch.fx graph, which pykern "
            "does not make: use split_spec"
        )
    refuse_lazy(module)
    call = tuple(mb_args), dict(mb_kwargs or {})
    traced = Marked(module, call, _marks_in(module, call, split_spec or {}))
    traced.cut(traced.parts, [torch.device("cpu")] * len(traced.parts), _nowhere)
    segments = list(traced.segments.values())
    first, *others = (segments[part.start : part.stop] for part in traced.parts)
    names = AllNames(module)
    stages = [FirstRecordedStage(first, names, traced)]
    return Pipe([*stages, *(RecordedStage(other, names) for other in others)])


def _nowhere(low: int, high: int, with_gradients: bool) -> bool:
    """Stages give what they have to the next one, as torch's do."""
    del low, high, with_gradients
    return False


def _marks_in(module: nn.Module, call: Call, split_spec: Mapping[str, Any]) -> Marks:
    """The cuts of the forward: its calls of `pipe_split`, and those that the spec adds.

    A module that the forward does not call is not a place to cut: torch does not say so.

    Raises:
        CutError: a name of the spec is not that of a module.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    finder = _Finder(module)
    for name, point in split_spec.items():
        # A module that has several names is called by any of them.
        require_module("split_spec", name, modules)
        at_end = is_end(f"split_spec[{name!r}]", point)
        (finder.behind if at_end else finder.before).add(modules[name])
    with Untouched(module, ()).kept(), as_before(), _C.Undo(finder.leave), torch.no_grad():
        # `as_before` ends the mode: after an interrupt, the mode's own exit may find another state.
        finder.__enter__()  # type: ignore[no-untyped-call]
        finder.watch()
        module(*call[0], **call[1])
    for name in split_spec:
        if modules[name] not in finder.called:
            warn(
                f"split_spec names {name!r}, which the forward does not call: no stage begins or "
                "ends there. Name a module around it, or one in it"
            )
    around = {part for each in finder.around for part in _with_lists(each)}
    return Marks(torch.ops.pippy._pipe_split, finder.before, finder.behind, around)


def _with_lists(module: nn.Module) -> Iterator[nn.Module]:
    """A module that is looked into, and the lists in it, which are not called themselves."""
    yield module
    for child in module.children():
        if is_list(child):
            yield from _with_lists(child)


class _Finder(TorchFunctionMode):
    """Finds the modules whose forwards contain marks.

    Attributes:
        before: modules that have a mark before each call.
        behind: modules that have a mark behind each call.
        around: the modules that were being called at a mark.
        called: all modules that were called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules = set(module.modules())
        # Those that are being called, the innermost last.
        self._calls: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self.before: set[nn.Module] = set()
        self.behind: set[nn.Module] = set()
        self.around: set[nn.Module] = set()
        self.called: set[nn.Module] = set()

    def watch(self) -> None:
        """Has calls of modules reported, those of other threads as well."""
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._return, always_call=True))

    def leave(self) -> None:
        """Ends the reports of modules."""
        # An interrupt may come before a handle is kept: then no module is known any more.
        self._modules = set()
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.pippy._pipe_split:
            self.around.update(self._calls)
        return func(*args, **(kwargs or {}))

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module not in self._modules:
            return
        self.called.add(module)
        if module in self.before or module in self.behind:
            self.around.update(self._calls)
        self._calls.append(module)

    def _return(self, module: nn.Module, *_: Any) -> None:
        if module in self._modules:
            self._calls.pop()

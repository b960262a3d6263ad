"""A stage of a recorded model, as a module that a PipelineStage can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...torch_private import HOOKS
from ...trace import Environment, Segment, Traced


class RunSegments(nn.Module):
    """The segments of a stage, as a step calls them.

    Args:
        segments: of the stage.
        traced: whose segments they are, for the first stage; None for others.
    """

    def __init__(self, segments: Sequence[Segment], traced: Traced | None) -> None:
        super().__init__()
        self._traced = traced
        self.segments = nn.ModuleList(segments)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Environment:
        """The arguments of the model as values; for the first stage.

        Records the model where they lead another way through it. That replaces functions of torch
        for a moment, so nothing else may run meanwhile.
        """
        assert self._traced is not None
        return self._traced.enter(args, kwargs)

    def refresh(self) -> None:
        """Has the segments hold the model's parameters and buffers of now."""
        for segment in self._of():
            segment.refresh()

    def place(self, device: torch.device) -> None:
        """Says where they run."""
        for segment in self._of():
            segment.device = None if device.type == "cpu" else device

    def forward(self, env: Environment) -> Any:
        """Runs the segments."""
        value: Any = env
        for segment in self.segments:
            value = segment(value)
        return value

    def _of(self) -> list[Segment]:
        return [segment for segment in self.segments if isinstance(segment, Segment)]


class RecordedStage(nn.Module):
    """A stage of a recorded model, with the model's names of what it holds.

    What it is given and returns are the values that later stages need; the last returns what the
    model does.

    Attributes:
        segment_run: what it does; its hooks are the stage's.
    """

    segment_run: RunSegments

    def __init__(self, segments: Sequence[Segment], traced: Traced | None = None) -> None:
        super().__init__()
        run = RunSegments(segments, traced)
        for hooks in HOOKS:
            setattr(run, hooks, getattr(self, hooks))
        # Not as a submodule, for segments have other names for parameters.
        vars(self)["segment_run"] = run
        for segment in segments:
            for key, module in segment._modules.items():
                _hold(self, key, nn.Module.add_module, module)
            for key, parameter in segment._parameters.items():
                _hold(self, key, nn.Module.register_parameter, parameter)
            for key, buffer in segment._buffers.items():
                _hold(self, key, nn.Module.register_buffer, buffer)

    def forward(self, env: Environment, /) -> Any:
        """Runs the segments."""
        return self.segment_run.forward(env)


class FirstRecordedStage(RecordedStage):
    """The first stage, which takes the arguments of the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the segments on them."""
        return self.segment_run.forward(self.segment_run.enter(args, kwargs))


class _Group(nn.Module):
    """A module that is cut, of which a stage holds a part."""


def _hold(root: nn.Module, key: str, add: Callable[[nn.Module, str, Any], None], it: Any) -> None:
    """Adds something under the name that it has in the model, if it is not there already."""
    *path, name = key.split("/")
    for part in path:
        inner = root._modules.get(part)
        if inner is None:
            inner = _Group()
            root.add_module(part, inner)
        if not isinstance(inner, _Group):
            return
        root = inner
    if name not in root._modules and name not in root._parameters and name not in root._buffers:
        add(root, name, it)

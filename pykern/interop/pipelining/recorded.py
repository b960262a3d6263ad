"""A stage of a recorded model, as a module that a PipelineStage can have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...trace import Environment, Segment, Traced


class RecordedStage(nn.Module):
    """A stage of a recorded model, with the model's names of what it holds.

    What it is given and returns are the values that later stages need; the last returns what the
    model does.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__()
        # In a tuple, for their parameters have other names.
        self._segments = tuple(segments)
        for segment in segments:
            for key, module in segment._modules.items():
                _hold(self, key, nn.Module.add_module, module)
            for key, parameter in segment._parameters.items():
                _hold(self, key, nn.Module.register_parameter, parameter)
            for key, buffer in segment._buffers.items():
                _hold(self, key, nn.Module.register_buffer, buffer)

    def place(self, device: torch.device) -> None:
        """Says where it runs."""
        for segment in self._segments:
            segment.device = None if device.type == "cpu" else device

    def forward(self, env: Environment, /) -> Any:
        """Runs the segments."""
        value: Any = env
        for segment in self._segments:
            value = segment(value)
        return value


class FirstRecordedStage(RecordedStage):
    """The first stage, which takes the arguments of the model."""

    def __init__(self, segments: Sequence[Segment], traced: Traced) -> None:
        super().__init__(segments)
        self._traced = traced

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Environment:
        """The arguments as values; records the model where they lead another way through it.

        That replaces functions of torch for a moment, so nothing else may run meanwhile.
        """
        return self._traced.enter(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the segments on the model's arguments, or on what `enter` has made of them."""
        entered = len(args) == 1 and isinstance(args[0], Environment)
        return super().forward(args[0] if entered else self.enter(args, kwargs))


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

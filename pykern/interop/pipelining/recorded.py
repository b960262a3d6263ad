"""A stage of a recorded model, as a module that a PipelineStage can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

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
        (entered,) = self._traced.environments([(args, kwargs)])
        return entered

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


class AllNames:
    """All names of what a model holds: a module or a tensor may have several.

    Args:
        model: which.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, list[str]] = {}
        named: Iterable[tuple[str, object]] = chain(
            model.named_modules(remove_duplicate=False),
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, it in named:
            self._names.setdefault(id(it), []).append(name)
        self._transient = {
            f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }

    def hold(self, root: nn.Module, it: nn.Module | Tensor) -> list[tuple[nn.Module, str]]:
        """Adds something of the model to a module, under all names that it has in the model.

        Returns:
            Where it is new: in which module, and its name there.
        """
        places = []
        for name in self._names[id(it)]:
            if isinstance(it, nn.Module):
                place = _hold(root, name, nn.Module.add_module, it)
            elif isinstance(it, nn.Parameter):
                place = _hold(root, name, nn.Module.register_parameter, it)
            else:
                persistent = name not in self._transient
                place = _hold(root, name, partial(_register_buffer, persistent), it)
            if place is not None:
                places.append(place)
        return places


class Following(nn.Module):
    """A module with tensors of a model, which it looks up there before it shows them."""

    def follow(self) -> None:
        """Has all within this look up the tensors that the model has by now."""
        for module in self.modules():
            if module is not self and isinstance(module, Following):
                module.follow()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `nn.Module`."""
        self.follow()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `nn.Module`."""
        self.follow()
        return super().load_state_dict(*args, **kwargs)

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        self.follow()
        return super()._named_members(*args, **kwargs)  # type: ignore[no-any-return]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.follow()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]


class RecordedStage(Following):
    """A stage of a recorded model, with the model's names of what it holds.

    A tensor or module with several names in the model has all of them here, so that the states of
    all stages together have the names of the model's.

    A stage takes and returns the values that later stages need. The last stage returns the output
    of the model.

    Attributes:
        segment_run: what it does; its hooks are the stage's.
    """

    segment_run: RunSegments

    def __init__(
        self, segments: Sequence[Segment], names: AllNames, traced: Traced | None = None
    ) -> None:
        super().__init__()
        run = RunSegments(segments, traced)
        for hooks in HOOKS:
            setattr(run, hooks, getattr(self, hooks))
        # Not as a submodule, for segments have other names for parameters.
        vars(self)["segment_run"] = run
        # The tensors that are in the stage itself: where, and where a segment has them.
        self._direct: list[tuple[nn.Module, str, Segment, str]] = []
        for segment in segments:
            for module in segment.children():
                names.hold(self, module)
            tensors = {**segment._parameters, **segment._buffers}
            for key, tensor in tensors.items():
                if tensor is not None:
                    places = names.hold(self, tensor)
                    self._direct += [(*place, segment, key) for place in places]
        for tensor in [*self.parameters(), *self.buffers()]:
            names.hold(self, tensor)

    def follow(self) -> None:
        """Has the tensors that the model has by now.

        Raises:
            RuntimeError: a module is another by now.
        """
        self.segment_run.refresh()
        for module, name, segment, key in self._direct:
            if name in module._parameters:
                module._parameters[name] = segment._parameters[key]
            else:
                module._buffers[name] = segment._buffers[key]

    def forward(self, env: Environment, /) -> Any:
        """Runs the segments."""
        self.follow()
        return self.segment_run.forward(env)


class FirstRecordedStage(RecordedStage):
    """The first stage, which takes the arguments of the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the segments on them."""
        self.follow()
        return self.segment_run.forward(self.segment_run.enter(args, kwargs))


class _Group(nn.Module):
    """A module that is cut, of which a stage holds a part."""


def _register_buffer(persistent: bool, root: nn.Module, name: str, it: Any) -> None:
    root.register_buffer(name, it, persistent)


def _hold(
    root: nn.Module, key: str, add: Callable[[nn.Module, str, Any], None], it: Any
) -> tuple[nn.Module, str] | None:
    """Adds something under the name that it has in the model, if it is not there already.

    Returns:
        The module that it is added to, and its name there; None where it is there already.
    """
    *path, name = key.split(".")
    for part in path:
        inner = root._modules.get(part)
        if inner is None:
            inner = _Group()
            root.add_module(part, inner)
        if not isinstance(inner, _Group):
            return None
        root = inner
    if name not in root._modules and name not in root._parameters and name not in root._buffers:
        add(root, name, it)
        return root, name
    return None

"""ZeRO-Offload: an optimizer whose state and steps are on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import OptimizerState
from ..modes import no_grad
from ..pipeline.pipeline import Pipeline
from ..runtime.stage.stage import Stage
from ..tensors.dtensor import is_dtensor
from .inner import copy_settings, groups_of, loss_of, show_state, with_settings
from .mirror import Mirror, StageMirrors

# The state's name for the values of a parameter of half precision.
_MASTER = "master"


class HostOptimizer(Optimizer):
    """Any of torch's optimizers, run on the host for a pipeline on GPUs.

    GPUs hold parameters and gradients; the optimizer's state, and a copy of the parameters that it
    steps, are in pinned memory of the host. A stage's gradients are on their way there as soon as
    the step has collected the last of them, while other stages still compute; in `step` the stages
    are stepped one after another, and the parameters of each go back while the next is stepped.
    So are a plan's REDUCE in `pipe.plan`, from now on.

    What a GPU would compute the host computes, with the same operations: on CPU workers, where all
    is on the host anyway, results are bit for bit those of the plain optimizer. Parameters of half
    precision have masters in float32, which are stepped and then rounded; so their results are
    better than the plain optimizer's, not equal.

    `.grad` stays where it is and is what counts: gradients that were clipped, unscaled or changed
    otherwise after `pipe.step` are copied again. So are those of pipelines that capture graphs or
    have a `process_group`, and of steps with a scaler, whose gradients become final later. Also a
    parameter that was written to is read again. What `.data` writes torch does not count: a
    gradient's change is then seen by its norm, a parameter's is not.

    Args:
        pipe: whose parameters are trained.
        optimizer_class: of `torch.optim`, or one like them, which updates each parameter by its own
            gradient and state alone.
        params: parameters of the pipeline, or groups of them, as for any optimizer; None for all
            that require grad.
        **defaults: for the optimizer.

    Raises:
        TypeError: the optimizer is one that looks at all parameters at once.
        ValueError: a parameter is not the pipeline's, or is a DTensor.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer_class: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        if optimizer_class is torch.optim.LBFGS:
            raise TypeError("LBFGS looks at all parameters at once; the host steps them by stages")
        self._part_of, self._parts = _parts(pipe)
        self._mirrors: dict[Tensor, Mirror] = {}
        groups = groups_of(pipe, params)
        self._inner = optimizer_class([self._mirrored(group) for group in groups], **defaults)
        super().__init__(with_settings(groups, self._inner.param_groups), self._inner.defaults)
        self._link_state()
        if pipe._can_stream_gradients():
            pipe._at_reduce(_weakly(self._stream))

    def _mirrored(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group of what is stepped."""
        for parameter in group["params"]:
            if parameter not in self._part_of:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the pipeline's"
                )
            if is_dtensor(parameter):
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is a DTensor, and whole "
                    "tensors are stepped on the host"
                )
        for parameter in group["params"]:
            self._mirrors[parameter] = self._part_of[parameter].add(parameter)
        for part in self._parts:
            part.follow()
        return group | {"params": [self._mirrors[each].master for each in group["params"]]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the pipeline, as for any optimizer."""
        super().add_param_group(param_group)
        if hasattr(self, "param_groups") and len(self.param_groups) > len(self._inner.param_groups):
            self._inner.add_param_group(self._mirrored(self.param_groups[-1]))

    def _stream(self, stage: Stage) -> None:
        # A scaler will unscale them.
        if getattr(stage.finish, "scale", None) is None:
            self._parts[stage.index].stream()

    @no_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient.

        Whatever is raised, each parameter has the values that the host has for it, and a parameter
        is stepped as a whole or not at all, as far as the optimizer does that.

        Args:
            closure: computes the gradients first; what it returns is returned.

        Raises:
            TypeError: a gradient is not dense. Nothing has been stepped.
        """
        loss = loss_of(closure)
        for part in self._parts:
            part.require_dense()
        copy_settings(self.param_groups, to=self._inner.param_groups)
        try:
            # In the order in which backwards end.
            for part in reversed(self._parts):
                part.fetch()
            for part in reversed(self._parts):
                self._step_part(part)
        finally:
            for part in self._parts:
                part.join()
        self._link_state()
        return loss

    def _step_part(self, part: StageMirrors) -> None:
        if part.land():
            try:
                self._inner.step()
            finally:
                part.give_back()

    def _link_state(self) -> None:
        """Has `state` show what is kept, by the pipeline's parameters."""
        stepped = ((parameter, mirror.master) for parameter, mirror in self._mirrors.items())
        show_state(self, self._inner.state, stepped)

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; with the `master` of each parameter of half precision."""
        packed = super().state_dict()
        in_order = (each for group in self.param_groups for each in group["params"])
        for index, parameter in enumerate(in_order):
            if index in packed["state"]:
                packed["state"][index] = self._entries(self._mirrors[parameter])
        return packed

    @no_grad
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, or the plain optimizer's."""
        self._inner.load_state_dict(state_dict)
        self.adopt()

    def whole(self) -> OptimizerState:
        """The state by the pipeline's parameters, with masters."""
        state = {each: self._entries(mirror) for each, mirror in self._mirrors.items()}
        kept = {parameter: entries for parameter, entries in state.items() if entries}
        return OptimizerState(type(self._inner), self.param_groups, kept)

    def own(self) -> OptimizerState:
        """Where to load the state."""
        inner = self._inner
        copy_settings(self.param_groups, to=inner.param_groups)
        return OptimizerState(type(inner), inner.param_groups, inner.state, self._stepped)

    def _entries(self, mirror: Mirror) -> dict[str, Any]:
        entries: dict[str, Any] = self._inner.state.get(mirror.master, {})
        return (
            entries | {_MASTER: mirror.master.detach()} if entries and mirror.is_half else entries
        )

    def _stepped(self, parameter: Tensor) -> Tensor:
        return self._mirrors[parameter].master if parameter in self._mirrors else parameter

    @no_grad
    def adopt(self) -> None:
        """Shows what has been loaded into the inner optimizer."""
        for mirror in self._mirrors.values():
            entries = self._inner.state.get(mirror.master, {})
            if _MASTER in entries:
                mirror.master.copy_(entries.pop(_MASTER))
        copy_settings(self._inner.param_groups, to=self.param_groups)
        self._link_state()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HostOptimizer cannot be copied or pickled, for it belongs to a pipeline; save its "
            "state_dict, and make another one"
        )


def _parts(pipe: Pipeline) -> tuple[dict[nn.Parameter, StageMirrors], list[StageMirrors]]:
    """A part for each stage, and which of them a parameter belongs to: its first stage's."""
    parts: list[StageMirrors] = []
    part_of: dict[nn.Parameter, StageMirrors] = {}
    for stage in pipe._executor.stages:
        parts.append(StageMirrors(pipe._executor.host_link(stage)))
        for layer in stage.originals:
            for parameter in layer.parameters():
                part_of.setdefault(parameter, parts[-1])
    # No stage uses the others.
    return {each: part_of.get(each, parts[0]) for each in pipe.parameters()}, parts


def _weakly(method: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Calls the method as long as there is its object."""
    reference = weakref.WeakMethod(method)

    def call(stage: Stage) -> None:
        found = reference()
        if found is not None:
            found(stage)

    return call

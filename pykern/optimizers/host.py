"""ZeRO-Offload: an optimizer whose state and steps are on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import OptimizerState
from ..modes import no_grad
from ..pipeline.pipeline import Pipeline
from ..runtime.stage.stage import Stage
from ..tensors.dtensor import is_dtensor
from .inner import (
    copy_settings,
    groups_of,
    loss_of,
    refuse_foreign,
    require_arguments,
    show_state,
    take_settings,
    take_state,
    with_settings,
)
from .mirror import Mirror, StageMirrors

_HOST = torch.device("cpu")
# The state's name for the values of a parameter of half precision.
_MASTER = "master"


class HostOptimizer(Optimizer):
    """Any of torch's optimizers, run on the host for a pipeline on GPUs.

    GPUs hold parameters and gradients. Pinned memory of the host holds the optimizer state and a
    copy of the parameters, which the optimizer steps. The copy of a stage's gradients to the host
    starts as soon as the pipeline's step has collected the last of them, while other stages still
    compute; for this, `pipe.plan` has REDUCE actions from now on. The optimizer's `step` steps the
    stages one after another; a stage's parameters are copied back while the next stage is stepped.

    The host uses the same operations as a GPU would. On CPU workers, where all tensors are on the
    host anyway, results are bit for bit those of the plain optimizer. Parameters of half precision
    have masters in float32, which are stepped and then rounded; so their results are better than
    the plain optimizer's, not equal.

    `.grad` stays on its device and decides: gradients that were clipped, unscaled or changed after
    `pipe.step` are copied again. Gradients that become final later are copied in `step` too:
    those of pipelines that capture graphs or have a `process_group`, and of steps with a scaler. A
    parameter that was written to is read again. Torch does not count writes through `.data`: such a
    change of a gradient is noticed by its norm, such a change of a parameter is not noticed.

    Args:
        pipe: the pipeline whose parameters are trained.
        optimizer_class: a class of `torch.optim`, or a similar class, which updates each parameter
            by its own gradient and state alone.
        params: parameters of the pipeline, or groups of them, as for any optimizer; None for all
            that require grad.
        **defaults: arguments of the optimizer.

    Raises:
        TypeError: the optimizer looks at all parameters at once.
        ValueError: a parameter is not the pipeline's, or is a DTensor.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer_class: Callable[..., Optimizer],
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        require_arguments(pipe, optimizer_class, "The host steps parameters by stages")
        self._part_of, self._parts = _parts(pipe)
        self._mirrors: dict[Tensor, Mirror] = {}
        groups = groups_of(pipe, params)
        mirrored = [self._mirrored(group) for group in groups]
        with _on_host():
            self._inner = optimizer_class(mirrored, **defaults)
        super().__init__(with_settings(groups, self._inner.param_groups), self._inner.defaults)
        self._link_state()
        if pipe._can_stream_gradients():
            pipe._at_reduce(_weakly(self._stream))

    def _mirrored(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group, with the host's copies in place of the parameters."""
        refuse_foreign(group["params"], self._part_of)
        for parameter in group["params"]:
            if is_dtensor(parameter):
                raise ValueError(
                    "parameters must be whole tensors to be stepped on the host, got a DTensor of "
                    f"shape {tuple(parameter.shape)}"
                )
        for parameter in group["params"]:
            self._mirrors[parameter] = self._part_of[parameter].add(parameter)
        for part in self._parts:
            part.follow()
        return group | {"params": [self._mirrors[each].master for each in group["params"]]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the pipeline, as for any optimizer."""
        is_made = len(self.param_groups) == len(self._inner.param_groups)
        if is_made:
            self._follow()
        super().add_param_group(param_group)
        if is_made:
            self._inner.add_param_group(self._mirrored(self.param_groups[-1]))
            self._link_state()

    def _stream(self, stage: Stage) -> None:
        # With a scaler, gradients are not final here: the scaler unscales them later.
        if getattr(stage.finish, "scale", None) is None:
            self._parts[stage.index].stream()

    @no_grad
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient.

        After any exception, each parameter equals its copy on the host, and a parameter is stepped
        as a whole or not at all, as far as the optimizer guarantees that.

        Args:
            closure: computes the gradients first; its result is returned.

        Raises:
            TypeError: a gradient is not dense. Nothing has been stepped.
            ValueError: parameters were moved between groups. Nothing has been stepped.
        """
        loss = loss_of(closure)
        for part in self._parts:
            part.require_dense()
        self._follow()
        try:
            # Parts are fetched in the order in which backwards end.
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
                with _on_host():
                    self._inner.step()
            finally:
                part.give_back()

    def _link_state(self) -> None:
        """Makes `state` show the optimizer state by the pipeline's parameters."""
        show_state(self, self._inner.state, self._masters().items())

    def _follow(self) -> None:
        """Makes the inner optimizer follow what the user has changed in groups and `state`."""
        masters = self._masters()
        take_settings(self, self._inner.param_groups, masters)
        take_state(self, self._inner.state, masters.items())

    def _masters(self) -> dict[Tensor, Tensor]:
        return {parameter: mirror.master for parameter, mirror in self._mirrors.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state, as for any optimizer, with the `master` of each half-precision parameter."""
        self._follow()
        packed = super().state_dict()
        in_order = (each for group in self.param_groups for each in group["params"])
        for index, parameter in enumerate(in_order):
            if index in packed["state"]:
                packed["state"][index] = self._entries(self._mirrors[parameter])
        return packed

    @no_grad
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, of this optimizer or of the plain one."""
        self._inner.load_state_dict(state_dict)
        self.adopt()

    def whole(self) -> OptimizerState:
        """The state by the pipeline's parameters, with masters."""
        self._follow()
        state = {each: self._entries(mirror) for each, mirror in self._mirrors.items()}
        kept = {parameter: entries for parameter, entries in state.items() if entries}
        return OptimizerState(type(self._inner), self.param_groups, kept)

    def own(self) -> OptimizerState:
        """The state into which a checkpoint is loaded."""
        inner = self._inner
        self._follow()
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
        """Shows the state that has been loaded into the inner optimizer."""
        for mirror in self._mirrors.values():
            entries = self._inner.state.get(mirror.master, {})
            if _MASTER in entries:
                mirror.master.copy_(entries.pop(_MASTER))
        copy_settings(self._inner.param_groups, to=self.param_groups)
        self._link_state()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HostOptimizer cannot be copied or pickled, because it belongs to a pipeline. Save "
            "its state_dict, and make another one"
        )


def _on_host() -> AbstractContextManager[object]:
    """Makes the host the default device, on which torch's optimizers count their steps."""
    # Each call of torch pays for a default device, so it is set only if another one is.
    return nullcontext() if torch.get_default_device() == _HOST else _HOST


def _parts(pipe: Pipeline) -> tuple[dict[nn.Parameter, StageMirrors], list[StageMirrors]]:
    """The part of each parameter, which is that of its first stage, and a part for each stage."""
    parts: list[StageMirrors] = []
    part_of: dict[nn.Parameter, StageMirrors] = {}
    for stage in pipe._executor.stages:
        device = pipe.plan.placement.device_of(stage.index)
        parts.append(StageMirrors(pipe._executor.driver.host_link(device)))
        for layer in stage.originals:
            for parameter in layer.parameters():
                part_of.setdefault(parameter, parts[-1])
    # Parameters that no stage uses go to the first part.
    return {each: part_of.get(each, parts[0]) for each in pipe.parameters()}, parts


def _weakly(method: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """A function that calls the method as long as the method's object lives."""
    reference = weakref.WeakMethod(method)

    def call(stage: Stage) -> None:
        found = reference()
        if found is not None:
            found(stage)

    return call

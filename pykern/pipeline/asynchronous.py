"""The half of a pipeline whose schedule updates weights within a step, without a flush."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..modes import as_before
from ..partition.balance import Partition
from ..partition.layers import refuse_shared
from ..plan import Kind, Timeline
from ..plan.parts import Parts
from ..plan.shares import Shares
from ..runtime.asynchronous.executor import KINDS, Unflushed
from ..runtime.asynchronous.optimizers import MakeOptimizer, make_optimizer
from ..runtime.batch import Batch
from ..runtime.cpu.workers import Workers
from ..runtime.devices import Lane
from ..runtime.executor import Driver, Executor
from ..runtime.stage.layer_copies import refuse_to_copy, trains
from ..runtime.stage.stage import Stage
from .choose_plan import Schedule, choose_parts
from .measured import Measured

# What may stand beside such a schedule, of what a pipeline can be given.
_ALLOWED: Mapping[str, Sequence[object]] = {
    "capture": (False,),
    "recompute": (None,),
    "check_finite": ("off", "loss"),
    "deferred_batch_norm": (False,),
    "process_group": (None,),
    "replicas": (1,),
    "tensor_parallel": (None,),
    "verify": (False,),
}
_WHY = "a schedule that updates weights within a step cannot run it"


@dataclass(frozen=True)
class Updates:
    """How weights are updated within a step.

    Attributes:
        parts: of the schedule.
        make: gives the optimizer.
    """

    parts: Parts
    make: MakeOptimizer


class Updating(Measured):
    """What a pipeline can do whose schedule is PipeDream or the like.

    Attributes:
        optimizer: what updates the parameters of all stages; None where the caller does.
    """

    optimizer: Optimizer | None = None
    _reduction: str

    def flush(self) -> Tensor | None:
        """Runs the microbatches that are in flight, with their updates.

        Only a schedule that updates weights leaves any: PipeDream or the like. It is to be called
        in the state of the steps before (gradients on, autocast).

        Returns:
            The mean loss of the rows whose loss was computed now, or None where there were none.

        Raises:
            RuntimeError, BaseException: as for `step`.
        """
        executor = self._executor
        if not isinstance(executor, Unflushed):
            return None
        if executor.in_flight and not torch.is_grad_enabled():
            raise RuntimeError("flush computes gradients, but they are off here (torch.no_grad?)")
        with as_before():
            loss, program = executor.flush()
        if program is not None:
            self._last_program = program
        return loss

    def prediction(self) -> Timeline:
        """As of a pipeline whose steps end with a flush.

        Raises:
            RuntimeError: the last step had none.
        """
        if self.optimizer is not None and self._last_program is not self._predict_program:
            raise RuntimeError(
                "a step without a flush is a part of a plan, which the simulator does not know: "
                "simulate(pipe.plan, pipe.costs()) is for a batch with its flush"
            )
        return super().prediction()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module.

        Raises:
            RuntimeError: microbatches are in flight, so that stages are at different updates.
        """
        self._require_flushed("there is no one state of the model")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module.

        Raises:
            RuntimeError: microbatches are in flight, whose backwards need what is here.
        """
        self._require_flushed("weights cannot be loaded")
        return super().load_state_dict(*args, **kwargs)

    def _require_flushed(self, what: str) -> None:
        if isinstance(self._executor, Unflushed):
            self._executor.require_flushed(what)

    def _open_executor(
        self,
        stages: Sequence[Stage],
        devices: Sequence[torch.device],
        driver: Driver,
        updates: Updates | None,
    ) -> None:
        """Makes what runs the plan, or the parts of one without an end, and its optimizer."""
        if updates is None:
            self._executor = Executor(stages, self.plan, devices, driver)
            return
        assert isinstance(driver, Workers)
        self._executor = Unflushed(stages, updates.parts, driver, mean=self._reduction == "mean")
        self.optimizer = make_optimizer(updates.make, self.parameters())
        self._executor.update_by(self.optimizer)

    def _give(self, batch: Batch, scale: Tensor | None) -> Tensor:
        """A step of such a schedule."""
        if scale is not None:
            raise ValueError("scaler goes with an optimizer.step() of yours, not with optimizer=")
        assert isinstance(self._executor, Unflushed)
        loss, self._last_program = self._executor.step(batch)
        return loss

    def _groups(self, rows: Sequence[int], total: int) -> list[tuple[Sequence[int], int]]:
        """The microbatches, by their rows, whose gradients one update is of, and the rows of all.

        Without updates within the step, these are all.
        """
        if not isinstance(self._executor, Unflushed):
            return [(rows, total)]
        size = self._executor.group
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [(group, max(sum(group), 1)) for group in groups]


def choose_updates(
    schedule: Schedule,
    shares: Shares,
    lanes: Sequence[Lane],
    options: dict[str, Any],
    given: Mapping[str, object],
) -> Updates | None:
    """How a schedule updates weights within a step; None without an optimizer.

    Args:
        schedule: a name or function of `pykern.schedules`.
        shares: how many devices there are, and parts that a batch is cut into.
        lanes: these devices.
        options: for the schedule.
        given: to the pipeline by name: what such a schedule cannot stand beside, and the optimizer.

    Raises:
        TypeError, ValueError, PlanError: it cannot run, or not beside what is given.
    """
    make = cast("MakeOptimizer | None", given["optimizer"])
    if make is None:
        return None
    _refuse_beside(given)
    parts = choose_parts(schedule, shares, options)
    if lanes[0].device.type != "cpu":
        raise ValueError("schedules that update weights within a step run on CPU workers only")
    plan = parts.plan
    held = [kind for kind in Kind if plan.has(kind) and kind not in KINDS]
    if held or plan.num_slices > 1:
        what = f"{held[0].name} actions" if held else f"{plan.num_slices} slices"
        raise ValueError(f"the plan has {what} beside its updates, which stages do not run")
    return Updates(parts, make)


def _refuse_beside(given: Mapping[str, object]) -> None:
    for name, allowed in _ALLOWED.items():
        if given[name] not in allowed:
            known = " or ".join(map(repr, allowed))
            raise ValueError(f"{name} must be {known} here, got {given[name]!r}: {_WHY}")
    if trains(given["loss_fn"], set()):
        raise ValueError(f"loss_fn has parameters that train: {_WHY}; give them to the last layer")


def refuse_layers(updates: Updates | None, layers: Mapping[str, nn.Module], cut: Partition) -> None:
    """Raises ValueError where stages have in common what they cannot, or weights no versions.

    The latter is so where stages share parameters, parameters share memory, or a copy of a layer
    could not take its place.
    """
    refuse_shared(layers, cut)
    if updates is None:
        return
    refuse_to_copy(layers, None, _WHY, in_order=True)
    names = list(layers)
    owner: dict[object, tuple[int, str]] = {}
    for stage, span in enumerate(cut.stages):
        for name in names[span.start : span.stop]:
            for key, parameter in layers[name].named_parameters():
                _refuse_parameter(f"{name}.{key}", parameter, stage, owner)


def _refuse_parameter(
    name: str, parameter: nn.Parameter, stage: int, owner: dict[object, tuple[int, str]]
) -> None:
    if hasattr(parameter, "main_grad"):
        raise ValueError(f"{name} has a main_grad, which an update would not take: {_WHY}")
    if parameter.numel() == 0:
        return
    first, other = owner.setdefault(id(parameter), (stage, name))
    if first != stage:
        raise ValueError(
            f"{other} (stage {first}) and {name} (stage {stage}) are one parameter, whose versions "
            "would be two stages': cut so that they share a stage (balance=[...]), or untie them"
        )
    place = parameter.untyped_storage().data_ptr()
    same, other = owner.setdefault(("storage", place), (id(parameter), name))
    if same != id(parameter):
        raise ValueError(
            f"{other} and {name} share memory, but each has versions of its own: clone() one"
        )

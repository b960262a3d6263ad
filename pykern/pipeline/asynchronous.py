"""Pipelines whose schedule updates weights within a step, such as PipeDream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..modes import as_before
from ..plan import Timeline
from ..runtime.asynchronous.executor import AsyncExecutor
from ..runtime.asynchronous.optimizers import MakeOptimizer
from ..runtime.batch import Batch
from ..runtime.devices import Devices
from ..runtime.loss import Loss, Losses
from .choose_plan import Schedule
from .pipeline import Pipeline
from .request import Request

_FIELDS = {field.name for field in fields(Request)}


class AsyncPipeline(Pipeline):
    """A `Pipeline` whose steps leave microbatches in flight, and call the optimizer themselves.

    The update rule differs from SGD's; see docs/asynchronous.md. The pipeline runs on CPU workers.

    Args:
        model: as for `Pipeline`.
        devices: "cpu:4" for four CPU workers.
        schedule: "pipedream", "pipedream_2bw", or a function that makes plans with updates.
        microbatches: how many parts each batch is cut into.
        optimizer: makes an optimizer of a list of parameters; it is called once.
        loss_fn: as for `Pipeline`; it has no parameters that train.
        reduction: as for `Pipeline`; "mean" is the mean over the rows of an update.
        **options: options of the schedule, e.g. `group=8`; and these arguments of `Pipeline`:
            `balance`, `sample`, `split_at`, `whole`, `check_finite="loss"` and `timeout`.

    Attributes:
        optimizer: the optimizer of the parameters of all stages.

    Raises:
        TypeError, ValueError, PlanError: as for `Pipeline`; nothing has been started.
    """

    optimizer: Optimizer
    _executor: AsyncExecutor

    def __init__(  # noqa: PLR0913 - what such a pipeline is made of, by keyword
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        devices: Devices,
        schedule: Schedule = "pipedream",
        microbatches: int | None = None,
        optimizer: MakeOptimizer,
        loss_fn: Loss | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        given = {name: options.pop(name) for name in _FIELDS & options.keys()}
        self._open(
            Request(
                model=model,
                devices=devices,
                schedule=schedule,
                microbatches=microbatches,
                optimizer=optimizer,
                loss_fn=loss_fn,
                reduction=reduction,
                options=options,
                **given,
            )
        )

    def flush(self) -> Tensor | None:
        """Runs the microbatches that are in flight, with their updates.

        Call it with the same settings as the steps before (gradients on, autocast).

        Returns:
            The mean loss of the rows whose loss was computed now, or None without such rows.

        Raises:
            RuntimeError, BaseException: as for `step`.
        """
        executor = self._executor
        if executor.in_flight and not torch.is_grad_enabled():
            raise RuntimeError("grad mode must be on in flush, got off. Leave torch.no_grad()")
        with as_before():
            loss, program = executor.flush()
        if program is not None:
            self._has_run(program)
        return loss

    def prediction(self) -> Timeline:
        """The simulator's timeline for the last forward; steps without a flush have no prediction.

        Raises:
            RuntimeError: the last run was a step or a flush, not a forward.
        """
        if self._last_program is not self._predict_program:
            raise RuntimeError(
                "the simulator does not know a step without a flush, which is a part of a plan. "
                "Use simulate(pipe.plan, pipe.costs()), for a batch with its flush"
            )
        return super().prediction()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the model, as for any module.

        Raises:
            RuntimeError: microbatches are in flight, so that stages are at different updates.
        """
        self._executor.require_flushed("there is no one state of the model")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads a state into the model, as for any module.

        Raises:
            RuntimeError: microbatches are in flight, whose backwards need the present weights.
        """
        self._executor.require_flushed("weights cannot be loaded")
        return super().load_state_dict(*args, **kwargs)

    def _train(self, batch: Batch, losses: Losses) -> Tensor:
        del losses
        loss, program = self._executor.step(batch)
        self._has_run(program)
        return loss

    def _loss_weights(self, rows: Sequence[int], total: int) -> list[float]:
        """The weights of the losses, by the rows of each update's own microbatches."""
        del total
        size = self._executor.group
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [w for group in groups for w in self._weights(group, max(sum(group), 1))]

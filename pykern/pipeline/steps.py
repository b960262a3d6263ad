"""Steps, forwards and streams of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor

from .. import _C
from ..modes import uncompiled
from ..partition.chain import calls_of
from ..plan import Kind
from ..runtime import microbatch
from ..runtime.batch import Batch, Outputs
from ..runtime.driver import Program
from ..runtime.features.feature import Features, Runner, TrainingStep
from ..runtime.in_order import InOrder
from ..runtime.loss import Loss, Losses
from ..runtime.mapped import Mapped
from ..runtime.through import refuse_backward
from ..tensors.trees import Call
from .arguments import Arguments
from .choose_levels import Levels
from .measured import Measured
from .with_graph import WithGraph, end_of_backward, refuse_transforms


class Steps(Measured):
    """The methods of a `Pipeline` that run its layers."""

    _arguments: Arguments
    _features: Features
    _steps: Runner
    _levels: Levels
    _with_graph: WithGraph
    _map_refused: str | None
    _reduction: Literal["mean", "sum"]

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        scaler: Any = None,
        **named: Any,
    ) -> Tensor:
        """Forward and backward of one batch on all devices.

        Adds to every parameter's `.grad` what the plain model's backward would add, and never
        rescales what is there. Microbatches add up in the order of the plan's B and W, which is
        ascending in all of `pykern.schedules`; where the plan has replicas, those of the first do,
        then the sum of each other is added. Where stages share a parameter, those of the first do,
        and when the step has ended, the sum of each other stage is added, in ascending order. A
        parameter's hooks are called for each of these additions. A loss that does its part of the
        backward at once (`pykern.kernels.head_loss`) adds the gradients of its weight in the order
        of F.

        Args:
            *inputs: arguments of the first layer, or of the model's own forward; tensors anywhere
                in them have one row per sample in dimension 0, everything else is given to every
                microbatch. The number of rows may change from step to step and need not be a
                multiple of the microbatches.
            target: second argument of the loss function, cut in the same way.
            scaler: a `torch.amp.GradScaler`, by whose scale gradients are multiplied, as
                `scaler.scale(loss)` would do.
            **named: arguments by name, cut in the same way, for every layer whose forward names
                them, or for the model's own forward.

        Returns:
            The loss of the full batch, detached, not scaled, without dimensions.

        Raises:
            SplitError: the batch cannot be cut.
            TypeError: `scaler` is not a GradScaler.
            RuntimeError: there is no loss function, gradients are off, the plan has no backward, a
                layer was replaced, a tensor of the batch has a graph of its own, or a step is
                running.
            VerifyError: `verify` has found that the plain model gives something else.
            BaseException: the first exception of a stage, the same object, with a note of where.
                The gradients of that step are then undefined; the next step is not affected.
        """
        with _C.HoldForks(), uncompiled():
            if self._loss_fn is None:
                raise RuntimeError(
                    "loss_fn must be given for step, got None. Make Pipeline(..., loss_fn=...)"
                )
            step = partial(self._step, (inputs, named), target, scaler, self._loss_fn)
            return self._features.within(scaler, step)

    def map(
        self,
        function: Callable[..., Any],
        *inputs: Any,
        target: Any = None,
        scaler: Any = None,
        **named: Any,
    ) -> list[Any]:
        """A step with a loss function for this call only; returns its results by microbatch.

        The plan decides when the backward of a microbatch starts, as in `step`. Under 1F1B a device
        holds the activations of a few microbatches; a loss outside of the pipeline needs those of
        all. Gradients are added to `.grad` as in `step`. Each call may bring another function.

        Args:
            function: called with (output, target) of a microbatch, or (output) without a target, on
                the device of the last stage. It returns the microbatch's loss, without dimensions,
                or a tuple of the loss and anything else. `reduction` combines the losses.
            *inputs: as for `step`.
            target: as for `step`.
            scaler: as for `step`.
            **named: as for `step`.

        Returns:
            The results of `function` for all microbatches with at least one row, in ascending
            order, with detached tensors.

        Raises:
            TypeError: `function` is not callable.
            ValueError: an option of the pipeline does not support `map`; the message names it.
            BaseException: as for `step`.
        """
        with _C.HoldForks(), uncompiled():
            if self._map_refused is not None:
                raise ValueError(self._map_refused)
            if not callable(function):
                raise TypeError(
                    f"function must be callable, got {type(function).__name__}. The batch comes "
                    "behind it: pipe.map(function, batch)"
                )
            mapped = Mapped(function)
            step = partial(self._step, (inputs, named), target, scaler, mapped.loss, mapped)
            try:
                self._features.within(scaler, step)
            finally:
                mapped.end()
            return [mapped.results[number] for number in sorted(mapped.results)]

    def _step(
        self, call: Call, target: Any, scaler: Any, loss_fn: Loss, mapped: Mapped | None = None
    ) -> Tensor:
        """This process's part of a step."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "grad mode must be on in step, got off. Leave "
                "torch.no_grad(), or call the pipeline itself"
            )
        if not (self.plan.has(Kind.B) or self.plan.has(Kind.I)):
            raise RuntimeError(
                "the plan must have backwards for step, got forwards only. Call the pipeline itself"
            )
        self._chain.require_unchanged(self._modules)
        self._arguments.require(call, target=target, loss=loss_fn)
        rows = self._rows(call, target, graphs=False)
        given = (*call, target)
        call, target = self._executor.replicas.place(call, target)
        parts = None if target is None else microbatch.split(target, rows)
        targets = None if parts is None else self._executor.replicas.place_targets(parts)
        step = TrainingStep((call, target), rows, scaler, sum(rows))
        self._features.begin(step)
        weights = self._loss_weights(rows, step.total)
        losses = Losses(
            loss_fn,
            targets,
            weights,
            step.scale,
            must_be_finite=step.checked,
            in_one_memory=self._executor.in_one_memory,
        )
        finish: Losses | Mapped = losses
        if mapped is not None:
            finish, mapped.losses = mapped, losses
        batch = Batch(call, target, rows, finish, self._levels, self._chain.enter, given)
        return self._train(batch, losses)

    def _train(self, batch: Batch, losses: Losses) -> Tensor:
        # Features finish within the step, because they may still make it fail.
        result = partial(self._features.finish, losses.total)
        return self._run(self._train_program, batch, result)  # type: ignore[no-any-return]

    def _run(self, program: Program, batch: Batch, result: Callable[[], Any] = lambda: None) -> Any:
        found = self._steps.run(program, batch, result)
        self._has_run(program)
        return found

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for the whole batch, in the graph of the caller.

        In grad mode this is one operation of autograd: its backward runs the backwards of all
        stages, in the order of the plan, and autograd gets the gradient of each parameter, complete
        (docs/loss-outside.md). It can run once. Without gradients, forwards alone run.

        Args:
            *inputs: as for `step`.
            **named: as for `step`.

        Returns:
            The output of the last layer, with its tensors joined along dimension 0. Tensors without
            dimensions, such as a loss that the model computes, are combined as `reduction` says.

        Raises:
            SplitError: the batch cannot be cut, or outputs cannot be joined.
            TypeError: an output hides tensors with a graph from torch.utils._pytree.
            RuntimeError: torch.func, torch.export, torch.jit.trace or forward-mode differentiation
                is in force, a layer was replaced, or the pipeline is running. In a backward: as
                docs/loss-outside.md says.
            BaseException: as for `step`, from here or from the backward.
        """
        with _C.HoldForks(), uncompiled():
            self._chain.require_unchanged(self._modules)
            call = inputs, named
            self._arguments.require(call)
            refuse_transforms(call)
            anchor = end_of_backward(call, self) if torch.is_grad_enabled() else None
            return self._predict(call) if anchor is None else self._outside(call, anchor)

    def _outside(self, call: Call, anchor: Tensor) -> Any:
        """The output of a forward whose backward the caller runs, and which leads to `anchor`."""
        outside = self._with_graph
        if outside.refused is not None:
            return refuse_backward(self._predict(call), outside.refused, anchor)
        self._features.ready()
        rows = self._rows(call)
        weights = self._weights(rows, sum(rows))
        output, program = outside.run(call, rows, weights, self._chain.enter, self)
        self._has_run(program)
        return output

    def _predict(self, call: Call) -> Any:
        """The output of a forward without a backward."""
        output = self._steps.predict(self._predict_program, *self._open_batch(call))
        self._has_run(self._predict_program)
        return output

    def stream(self, batches: Iterable[Any]) -> InOrder:
        """The outputs of batches, bit for bit as the pipeline returns them for each batch alone.

        No device waits for the end of a batch: later batches are fetched in the calling thread and
        run while the caller uses an output. If layers draw random numbers, batches run one by one,
        as in a loop; the first batch always does, as it shows whether layers draw, and so does one
        with other values beside tensors than the batch before it. Until the iterator ends, is left
        or closed, do not use the pipeline otherwise or change the model.

        Args:
            batches: of any sizes, perhaps without end: a tensor, a tuple of arguments, or a dict of
                keyword arguments.

        Returns:
            An iterator of the outputs, in the order of the batches, with a method `close`.

        Raises:
            RuntimeError: the pipeline is streaming already, or running a step; or a stage has
                raised StopIteration, which is then the cause.
            BaseException: as for `step`, or from `batches`, after the outputs of earlier batches.
                The note names the batch, counted from 0 like microbatches.
        """
        self._chain.require_unchanged(self._modules)
        calls = calls_of(batches)
        return self._executor.stream(self._predict_program, calls, self._open_batch)

    def _open_batch(self, call: Call) -> tuple[Batch, Outputs]:
        self._features.ready()
        self._arguments.require(call)
        rows = self._rows(call)
        placed, _ = self._executor.replicas.place(call, None)
        outputs = Outputs(self._weights(rows, sum(rows)))
        return Batch(placed, None, rows, outputs, (), self._chain.enter, call), outputs

    def flush(self) -> Tensor | None:
        """Runs the microbatches in flight; only an `AsyncPipeline` has any after a step."""
        return None

    def close(self) -> None:
        """Ends the worker threads, or gives back GPU memory; the layers stay usable.

        The interpreter's exit closes the pipeline too.
        """
        self._executor.close()
        self._features.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rows(self, call: Call, target: Any = None, *, graphs: bool = True) -> list[int]:
        batch = {"inputs": call[0], "named": call[1]}
        if target is not None:
            batch["target"] = target
        size = microbatch.batch_size(batch, graphs=graphs)
        return microbatch.sizes(size, self.plan.num_microbatches)

    def _weights(self, rows: Sequence[int], total: int) -> list[float]:
        return [1.0 if self._reduction == "sum" else n / total for n in rows]

    def _loss_weights(self, rows: Sequence[int], total: int) -> list[float]:
        """The weights of the losses of a step's microbatches."""
        return self._weights(rows, total)

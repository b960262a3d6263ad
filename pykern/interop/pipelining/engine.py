"""One step of all stages: what every rank brings to it, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...modes import as_before
from ...once import once
from ...pipeline.pipeline import Pipeline
from ...plan import Plan
from ...runtime.batch import Batch
from ...runtime.loss import Loss, Losses
from ...runtime.stage.stage import Ends
from ...tensors.trees import Call, map_tensors
from .stage import Keywords, PipelineStage, StageCall


@dataclass(frozen=True)
class CutBatch(Batch):
    """A batch that comes in microbatches.

    Attributes:
        parts: the positional arguments of the first layer, by microbatch.
    """

    parts: Sequence[tuple[Any, ...]] = ()

    @once
    def calls(self) -> Sequence[Call | None]:
        """Arguments of the first layer, for each microbatch."""
        return [(part, {}) for part in self.parts]


@dataclass
class Results:
    """Outputs and losses of the last stage. Lists have an entry for each microbatch.

    Attributes:
        loss_fn: called with (output, target); None where no loss is wanted.
        targets: of the loss.
        weight: of each microbatch's loss in the gradients; None without backward.
        keeps_outputs: whether `outputs` are wanted.
        outputs: of the model, by microbatch, detached.
        losses: by microbatch, detached.
    """

    loss_fn: Loss | None
    targets: Sequence[Any]
    weight: float | None
    keeps_outputs: bool
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def finish(self) -> Callable[[int, Any, bool], Ends]:
        """Returns the function that finds a microbatch's start of backward in its output."""
        if self.loss_fn is None or self.weight is None:
            return partial(self._keep, self._evaluate)
        weights = [self.weight] * len(self.targets)
        return partial(self._keep, Losses(self._loss, self.targets, weights))

    def _keep(
        self, then: Callable[[int, Any, bool], Ends], microbatch: int, output: Any, once: bool
    ) -> Ends:
        if self.keeps_outputs:
            self.outputs[microbatch] = map_tensors(Tensor.detach, output)
        ends = then(microbatch, output, once)
        if isinstance(then, Losses):
            self.losses[microbatch] = then.of(microbatch)
        return ends

    def _evaluate(self, microbatch: int, output: Any, _: bool) -> Ends:
        if self.loss_fn is not None:
            self.losses[microbatch] = self._loss(output, self.targets[microbatch])
        return (), ()

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self.loss_fn is not None
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RuntimeError(f"loss_fn must return one number for each microbatch, got {found}")
        return loss.reshape(())


class Engine(Pipeline):
    """The stages of all ranks in one pipeline, a layer each.

    Args:
        stages: in ascending order.
        plan: for them. All stages that it gives one device to name the same one.

    Raises:
        ValueError: the stages of one device of the plan name several.
    """

    def __init__(self, stages: Sequence[PipelineStage], plan: Plan) -> None:
        homes: list[str] = [""] * plan.num_devices
        for stage in stages:
            number = plan.placement.device_of(stage.stage_index)
            name = stage.lane
            if homes[number] not in ("", name):
                raise ValueError(
                    f"stage {stage.stage_index} must be on {homes[number]}, where the schedule "
                    f"runs it with others, got {name}"
                )
            homes[number] = name
        calls = [StageCall(stage) for stage in stages]
        devices = ["cpu" if name.startswith("cpu") else name for name in homes]
        super().__init__(calls, devices=devices, schedule=plan, balance=[1] * plan.num_stages)
        self._calls = calls
        for call in calls:
            call.settle()

    def run(
        self,
        arguments: Sequence[tuple[Any, ...]],
        keywords: Mapping[int, Sequence[Keywords]],
        results: Results,
    ) -> None:
        """One step, or a forward of all microbatches where the results have no weight.

        Args:
            arguments: of the first stage, by microbatch.
            keywords: of each stage, by microbatch.
            results: what is wanted of the last stage, and gets it.
        """
        trains = results.weight is not None
        self._chain.require_unchanged(self._modules)
        for index, call in enumerate(self._calls):
            call.begin(keywords[index])
        try:
            with as_before(), torch.set_grad_enabled(trains):
                parts = self._calls[0].enter(arguments)
                rows = [1] * len(parts)
                batch = CutBatch(
                    ((), {}), None, rows, results.finish(), given=(arguments, keywords), parts=parts
                )
                self._run(self._train_program if trains else self._predict_program, batch)
        finally:
            for call in self._calls:
                call.keywords = ()

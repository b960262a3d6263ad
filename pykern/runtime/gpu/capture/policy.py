"""Decides whether a training step is captured, replayed, or run as usual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from .... import _C
from ....plan import Plan
from ....user_code import warn
from ...batch import Batch
from ...loss import Losses
from ...random.draws import Facts
from ...stage.stage import Stage
from ..cuda import Gpus
from .contents import Contents
from .recording import Recording
from .refusals import (
    CannotCapture,
    held_graph,
    modules_of,
    modules_of_loss,
    refuse_batch,
    refuse_loss,
    refuse_plan,
    refuse_stage,
    shapes,
    signature,
)

Capture = bool | Literal["auto", "step"]

# After this many changes of layers without a capture, changes are taken to be regular.
_TOO_MANY = 4


class CapturePolicy:
    """Decides for each step whether it is replayed.

    Args:
        capture: the user's setting, see `Pipeline`.
        gpus: of the lanes.
        plan: the training plan.
        stages: of the first replica.
        lane_of: the lane of each stage.

    Raises:
        CannotCapture: `capture` requires graphs, but the plan cannot be captured.
    """

    def __init__(
        self,
        capture: Capture,
        gpus: Gpus,
        plan: Plan,
        stages: Sequence[Stage],
        lane_of: Sequence[int],
    ) -> None:
        self._must = capture != "auto"
        self._gpus = gpus
        self._plan = plan
        self._stages = stages
        self._lane_of = lane_of
        self.recording: Recording | None = None
        self._recorded: Any = None
        # The signature of the last step that ran as usual, and the parameters that it trained.
        self._warm: Any = None
        self._trained: list[Tensor] = []
        # The contents of layers and loss after that step, or after the recorded step, if any.
        self._contents = Contents([])
        # Before a step that runs as usual: each parameter's gradient and its version.
        self._gradients: list[tuple[Tensor | None, int]] = []
        self._generators: Any = None
        self._drew = False
        self._draws: list[Facts] = []
        self._refused: Any = None
        # The number of changes of layers since the last capture.
        self._changes = 0
        self._has_warned = False
        if self._must:
            refuse_plan(plan)

    def ready(self, program: _C.StreamProgram, batch: Batch) -> Recording | None:
        """The recording to replay for this batch, maybe captured now; None to run it as usual.

        Raises:
            CannotCapture: `capture` requires graphs, but the step cannot be captured.
        """
        if not isinstance(batch.finish, Losses):
            return None
        self._generators = self._gpus.generators()
        wanted = signature(batch, self._stages)
        self._notice(wanted)
        if self.recording is not None and wanted == self._recorded:
            return self.recording
        if self.recording is not None or wanted is None:
            self._warn(
                f"{shapes(batch)}, the modes of the caller, or the calls of the model's forward "
                "are not what was captured"
            )
        elif wanted == self._warm and wanted != self._refused:
            self._record(program, batch, wanted)
            if self.recording is not None:
                return self.recording
        self._gradients = [_written(parameter) for parameter in self._parameters()]
        return None

    def _notice(self, wanted: Any) -> None:
        """Drops graphs whose layers, or loss, have changed."""
        if self._contents.changed() is not None:
            self._refused = None
        elif wanted is None or self._warm is None or wanted[-1] == self._warm[-1]:
            return
        self._warm, self._contents = None, Contents([])
        if self.recording is not None:
            self._gpus.synchronize()
            self.recording = self._recorded = None
        self._changes += 1
        if self._changes == _TOO_MANY:
            self._give_up(CannotCapture("layers change in every step: a number they hold, say"))

    def _record(self, program: _C.StreamProgram, batch: Batch, wanted: Any) -> None:
        try:
            refuse_plan(self._plan)
            for stage, facts in zip(self._stages, self._draws, strict=True):
                # A step of another mode has come in between, such as a forward alone.
                stage.draws.know(facts)
                refuse_stage(stage)
            refuse_loss(batch)
            refuse_batch(batch)
            if self._drew:
                raise CannotCapture("a kernel of which torch knows nothing draws random numbers")
            recording = self._capture(program, batch)
        except CannotCapture as error:
            # If capture is required, the next step tries again, since the cause may be removed.
            if not self._must:
                self._refused, self._contents = wanted, Contents([])
            self._give_up(error)
        else:
            self._changes = 0
            self._recorded = wanted
            self.recording = recording

    def _capture(self, program: _C.StreamProgram, batch: Batch) -> Recording:
        held = held_graph(self._stages)
        try:
            recording = Recording(
                self._gpus, program, self._stages, self._lane_of, batch, self._trained
            )
        except CannotCapture as error:
            # A graph that is held makes captures fail with errors that do not name it.
            raise held or error from error.__cause__
        # A layer that keeps its output holds a graph too: the layer is named before the graph.
        changed = self._contents.changed()
        if changed is not None:
            raise CannotCapture(
                f"{changed} changes what it holds when it is called, which a replay would not"
            )
        if held is not None:
            raise held
        return recording

    def learn(self, batch: Batch) -> None:
        """Learns from a step that has run as usual, to its end."""
        if isinstance(batch.finish, Losses):
            self._warm = signature(batch, self._stages)
            self._drew = self._gpus.generators() != self._generators
            self._draws = [stage.draws.facts for stage in self._stages]
            pairs = zip(self._parameters(), self._gradients, strict=True)
            self._trained = [
                parameter for parameter, before in pairs if _was_written(parameter, *before)
            ]
            if self.recording is None:
                modules = [named for stage in self._stages for named in modules_of(stage)]
                self._contents = Contents([*modules, *modules_of_loss(batch)])
        self._gradients = []

    def _parameters(self) -> list[Tensor]:
        modules = (module for stage in self._stages for module in stage.layers)
        found = (parameter for module in modules for parameter in module.parameters())
        return list({id(parameter): parameter for parameter in found}.values())

    def _give_up(self, error: CannotCapture) -> None:
        if self._must:
            raise error
        self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"steps run without CUDA graphs: {why}")


def _written(parameter: Tensor) -> tuple[Tensor | None, int]:
    """The parameter's gradient, and the gradient's version."""
    gradient = parameter.grad
    return gradient, 0 if gradient is None else gradient._version


def _was_written(parameter: Tensor, gradient: Tensor | None, version: int) -> bool:
    """Whether the parameter's gradient was replaced or written."""
    now = parameter.grad
    return now is not None and (now is not gradient or now._version != version)

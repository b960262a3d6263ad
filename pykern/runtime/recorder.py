"""When a training step is captured, replayed, or run as usual."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from .. import _C
from ..plan import Plan
from .batch import Batch
from .capture import Recording
from .cuda import Gpus
from .loss import Losses
from .obstacles import CannotCapture, refuse_plan, refuse_stage, shapes, signature
from .stage import Stage

Capture = bool | Literal["auto", "step"]

# This many steps in a row whose layers are set otherwise than in the one before are no accident.
_TOO_MANY = 4
_TO_THE_USER = 8


class Recorder:
    """Decides for each step whether it is replayed.

    Args:
        capture: what the user asks for, see `Pipeline`.
        gpus: where the lanes are.
        plan: the training plan.
        stages: those of the first replica.
        lane_of: the lane of each.

    Raises:
        CannotCapture: the plan cannot be captured, but has to be.
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
        # Of the last step that ran as usual, what it trained, and what it drew from.
        self._warm: Any = None
        self._trained: list[Tensor] = []
        self._generators: Any = None
        self._drew = False
        self._refused: Any = None
        # How often layers have been set otherwise since the last capture.
        self._changes = 0
        self._has_warned = False
        if self._must:
            refuse_plan(plan)

    def ready(self, program: _C.StreamProgram, batch: Batch) -> Recording | None:
        """What to replay for this batch, captured now if it is time; None to run it as usual.

        Raises:
            CannotCapture: something cannot be captured, but has to be.
        """
        if not isinstance(batch.finish, Losses):
            return None
        self._generators = self._gpus.generators()
        wanted = signature(batch, self._stages)
        self._notice(wanted)
        if self.recording is not None and wanted == self._recorded:
            return self.recording
        if self.recording is not None or wanted is None:
            self._warn(f"{shapes(batch)}, or the modes of the caller, are not what was captured")
        elif wanted == self._warm and wanted != self._refused:
            self._record(program, batch, wanted)
        return self.recording if wanted == self._recorded else None

    def _notice(self, wanted: Any) -> None:
        """Lets go of graphs whose layers have changed."""
        if wanted is None or self._warm is None or wanted[-1] == self._warm[-1]:
            return
        if self.recording is not None:
            self._gpus.synchronize()
            self.recording = self._recorded = None
        self._changes += 1
        if self._changes == _TOO_MANY:
            self._give_up(CannotCapture("layers change in every step: a number they hold, say"))

    def _record(self, program: _C.StreamProgram, batch: Batch, wanted: Any) -> None:
        try:
            refuse_plan(self._plan)
            for stage in self._stages:
                refuse_stage(stage)
            if self._drew:
                raise CannotCapture("a kernel of which torch knows nothing draws random numbers")
            self.recording = Recording(
                self._gpus, program, self._stages, self._lane_of, batch, self._trained
            )
        except CannotCapture as error:
            self._refused = wanted
            self._give_up(error)
        else:
            self._changes = 0
            self._recorded = wanted

    def learn(self, batch: Batch) -> None:
        """A step has run as usual, to its end."""
        if isinstance(batch.finish, Losses):
            self._warm = signature(batch, self._stages)
            self._drew = self._gpus.generators() != self._generators
            self._trained = [
                parameter
                for stage in self._stages
                for layer in stage.layers
                for parameter in layer.parameters()
                if parameter.grad is not None
            ]

    def _give_up(self, error: CannotCapture) -> None:
        if self._must:
            raise error
        self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            # As from the line that calls the pipeline.
            warnings.warn(f"pykern: steps run without CUDA graphs: {why}", stacklevel=_TO_THE_USER)

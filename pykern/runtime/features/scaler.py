"""Gradient scaling: a GradScaler's scale multiplies the losses of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from .feature import Feature, Made, TrainingStep


class Scaler(Feature):
    """Uses the scale of the scaler that a step is given.

    Args:
        refused: why steps of this pipeline cannot have a scaler; None if they can.
    """

    def __init__(self, refused: str | None) -> None:
        self._refused = refused

    def attach(self, made: Made) -> None:
        """Keeps the executor, whose last stage has the losses."""
        self._executor = made.executor

    def step(self, scaler: object) -> None:
        """Raises ValueError if a step has a scaler that this pipeline refuses."""
        off = isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
        if scaler is not None and not off and self._refused is not None:
            raise ValueError(self._refused)

    def begin(self, step: TrainingStep) -> None:
        """Sets the scale of the step."""
        if step.scaler is not None:
            step.scale = _scale_of(step.scaler, self._executor.replicas.end)


def _scale_of(scaler: object, device: torch.device) -> Tensor | None:
    """The scale of a scaler; None if the scaler is disabled.

    Raises:
        TypeError: `scaler` is not a torch.amp.GradScaler.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got a {type(scaler).__name__}")
    if not scaler.is_enabled():
        return None
    # The scale itself is a private attribute.
    return scaler.scale(torch.ones((), device=device))

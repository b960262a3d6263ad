"""A scaler of gradients, by whose scale the losses of a step are multiplied."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .feature import Feature, Made, TrainingStep


class Scaler(Feature):
    """Takes the scale of the scaler that a step is given.

    Args:
        refused: why no step of this pipeline can have one; None where each can.
    """

    def __init__(self, refused: str | None) -> None:
        self._refused = refused

    def attach(self, made: Made) -> None:
        """Is told of the stages, whose last has the losses."""
        self._executor = made.executor

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """Raises ValueError where a step has a scaler and cannot."""
        off = isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
        if scaler is not None and not off and self._refused is not None:
            raise ValueError(self._refused)
        return nullcontext()

    def begin(self, step: TrainingStep) -> None:
        """Sets the scale of the step."""
        if step.scaler is not None:
            step.scale = _scale_of(step.scaler, self._executor.replicas.end)


def _scale_of(scaler: object, device: torch.device) -> Tensor | None:
    """What a scaler multiplies losses by; None where nothing.

    Raises:
        TypeError: it is no scaler.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a torch.amp.GradScaler, got a {type(scaler).__name__}")
    if not scaler.is_enabled():
        return None
    # The number itself is private.
    return scaler.scale(torch.ones((), device=device))

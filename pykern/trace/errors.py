"""Errors of cutting a model that has a forward of its own."""

from __future__ import annotations

from torch import nn


class CutError(ValueError):
    """The model cannot be cut there, or as it is; the message says where and why."""


class UnseenTensor(CutError):
    """A forward, or a module, uses what others have left elsewhere than in what they returned.

    Attributes:
        module: the one that has to be looked into for it to be seen, where it is known.
    """

    def __init__(self, message: str, module: nn.Module | None) -> None:
        super().__init__(message)
        self.module = module


class Unsettled(CutError):
    """A forward changes attributes, perhaps in its first call only."""


class ReplayError(RuntimeError):
    """A module did not do what it did when the forward around it was recorded."""

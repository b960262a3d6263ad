"""What may go wrong when a model is cut that has a forward of its own."""

from __future__ import annotations


class CutError(ValueError):
    """The model cannot be cut there, or as it is; the message says where and why."""


class ReplayError(RuntimeError):
    """A module did not do what it did when the forward around it was recorded."""

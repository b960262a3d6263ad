"""Recompute levels that fit a budget of memory: what they cost, and which of them to take."""

from .budget import Budget

__all__ = ["Budget"]

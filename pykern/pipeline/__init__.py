"""A model, a plan and the devices that run it, as a user meets them."""

from .pipeline import Pipeline

__all__ = ["Pipeline"]

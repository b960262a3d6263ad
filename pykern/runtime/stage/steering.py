"""Values that may steer the layers of a stage, beside the settings of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .settings import Settings


@dataclass(frozen=True)
class Steering:
    """Values and a loss that layers, or the end of the last stage, may ask what to do.

    Attributes:
        values: those of the batch that are not tensors.
        loss: the last loss function, which is not held, with its settings if it is a module.
    """

    values: tuple[object, ...] = ()
    loss: tuple[object, Any] = (None, None)

    def of(self, values: tuple[object, ...], function: object) -> Steering:
        """The steering of the next step.

        Args:
            values: of its batch.
            function: its loss function; None without one.
        """
        if function is None:
            return Steering(values, self.loss)
        if not isinstance(function, nn.Module):
            # A function may have the place in memory of one that is gone, but not its code.
            return Steering(values, (id(function), getattr(function, "__code__", None)))
        known, settings = self.loss
        is_known = known == id(function) and isinstance(settings, Settings)
        now = settings.now() if is_known else Settings([function])
        return Steering(values, (id(function), now))

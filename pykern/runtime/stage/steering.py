"""Values that may steer the layers of a stage, beside the settings of the layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import nn

from ...trace.code_names import content_of
from ...trace.state import described
from ...trace.values import PLAIN
from .settings import Settings


@dataclass(frozen=True)
class Steering:
    """Values and a loss that layers, or the end of the last stage, may ask what to do.

    Attributes:
        values: those of the batch that are not tensors.
        loss: the last loss function, which is held only if it cannot be referred to weakly; a
            method as its object and its function. Each with its settings or plain values.
    """

    values: tuple[object, ...] = ()
    loss: tuple[tuple[object, Any], ...] = ()

    def of(self, values: tuple[object, ...], function: object) -> Steering:
        """The steering of the next step: this object if nothing is different.

        Args:
            values: of its batch.
            function: its loss function; None without one.
        """
        loss = self.loss
        if isinstance(function, MethodType):
            loss = self._part(function.__self__), self._part(function.__func__)
        elif function is not None:
            loss = (self._part(function),)
        is_same = values == self.values and loss == self.loss
        return self if is_same else Steering(values, loss)

    def _part(self, held: object) -> tuple[object, Any]:
        reference = _reference(held)
        if not isinstance(held, nn.Module):
            return reference, _plain_values(held)
        last: tuple[object, Any] = self.loss[0] if self.loss else (None, None)
        return reference, last[1].now() if last[0] == reference else Settings([held])


def _reference(held: object) -> tuple[int, object]:
    """Equal for the same object only: another one with its place in memory has another one."""
    try:
        return id(held), ref(held)
    except TypeError:
        return id(held), held


def _plain_values(held: object) -> object:
    """The plain values in the attributes of an object, or in the variables around a function."""
    named: Iterable[tuple[object, object]]
    if isinstance(held, FunctionType):
        if held.__closure__ is None:
            return ()
        named = enumerate(map(content_of, held.__closure__))
    else:
        named = getattr(held, "__dict__", {}).items()
    return [(name, described(value)) for name, value in named if isinstance(value, PLAIN)]

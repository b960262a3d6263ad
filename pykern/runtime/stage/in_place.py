"""In-place layers: a stage copies what it is given where they would write that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...tensors.trees import tensors_of
from ...torch_private import version_of
from ..autograd.cut import copies

if TYPE_CHECKING:
    from .stage import Stage

FirstCall = Callable[..., Any]
LastCall = Callable[[Any], Any]


def on_copies(layer: FirstCall, *arguments: Any, **named: Any) -> Any:
    """Calls a layer with copies of its arguments."""
    return layer(*copies(arguments), **named)


def look_at_copies(stage: Stage, first: FirstCall, last: LastCall) -> tuple[FirstCall, LastCall]:
    """The first call on copies, and the last, which notes whether any has written these."""
    made: list[tuple[Tensor, int]] = []

    def copying(*arguments: Any, **named: Any) -> Any:
        copied = copies(arguments)
        made.extend([(one, version_of(one)) for one in tensors_of(copied)])
        return first(*copied, **named)

    def looking(value: Any) -> Any:
        found = last(value)
        # Nothing counts the writes to a tensor of inference mode.
        if any([one.is_inference() for one, _ in made]):
            return found
        stage.copies_input = any([version_of(one) != before for one, before in made])
        stage.looks_at_copies = False
        return found

    return copying, looking

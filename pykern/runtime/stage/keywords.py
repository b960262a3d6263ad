"""The arguments that a layer takes by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .stage import Stage


def keywords_of(layer: nn.Module) -> frozenset[str]:
    """The names of the arguments of a layer's forward that can be given by name.

    The first argument is left out: it is the value that the layer before has returned.
    """
    try:
        parameters = list(inspect.signature(layer.forward).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    return frozenset(
        parameter.name
        for number, parameter in enumerate(parameters)
        if parameter.kind in kinds and (number > 0 or parameter.kind is keyword_only)
    )


def by_name(stage: Stage, keywords: dict[str, Any]) -> list[Callable[..., Any]]:
    """The layers, each with the keyword arguments that its forward names."""
    layers = zip(stage.layers, stage.keywords_of, strict=True)
    return [
        partial(layer, **{name: value for name, value in keywords.items() if name in names})
        for layer, names in layers
    ]

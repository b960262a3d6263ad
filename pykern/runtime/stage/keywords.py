"""The arguments that a layer takes by name."""

from __future__ import annotations

import inspect

from torch import nn


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

"""Which arguments a layer can be given by name."""

from __future__ import annotations

import inspect

from torch import nn


def keywords_of(layer: nn.Module) -> frozenset[str]:
    """The arguments of a layer's forward that it can be given by name.

    Not the first, which is what the layer before has returned.
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

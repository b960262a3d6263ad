"""Calls of single layers of torch's that do the work of their forward in less Python.

Their argument has torch's name, by which models may give it, and they have the name of the forward,
which errors of wrong calls tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary

from .intercepting import here, include, key

BareCall = Callable[[Any], Any]


def bare_linear(layer: nn.Linear) -> BareCall:
    """Takes the parameters from where `nn.Module.__getattr__`, a call for each, would find them."""
    forward, held = layer.forward, vars(layer)
    if "weight" in held or "bias" in held:
        return forward

    def linear(input: Any) -> Any:
        parameters = held["_parameters"]
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:
            # Someone has put a tensor in the place of a parameter.
            return forward(input)
        return F.linear(input, weight, bias)

    linear.__qualname__ = forward.__qualname__
    return linear


def bare_dropout(layer: nn.Dropout) -> BareCall:
    """Gives the draw on the CPU its generator, so that it is not intercepted.

    The operations are those of torch's own dropout, in its order. torch takes several times as
    long to come to a kernel in Python as the draw of a small tensor takes.
    """
    forward = layer.forward

    def dropout(input: Any) -> Any:
        inner = here.inner
        # torch draws in other ways from nested tensors, and not at all with p = 0 or p = 1. A mode
        # of the caller's is given the dropout itself.
        if (
            inner is None
            or (own := inner.generator) is None
            or inner._outer is not None
            or type(input) is not Tensor
            or has_torch_function_unary(input)
            or not input.is_cpu
            or input.is_nested
            or layer.inplace
            or not layer.training
            or not 0 < layer.p < 1
        ):
            return forward(input)
        kept = 1 - layer.p
        include(key, False)
        try:
            noise = torch.empty_like(input).bernoulli_(kept, generator=own)
        finally:
            include(key, True)
        return input * noise.div_(kept)

    dropout.__qualname__ = forward.__qualname__
    return dropout


# By type, the forward that a call stands for, and its maker.
BARE: dict[type, tuple[Callable[..., Any], Callable[[Any], BareCall]]] = {
    nn.Linear: (nn.Linear.forward, bare_linear),
    nn.Dropout: (nn.Dropout.forward, bare_dropout),
}

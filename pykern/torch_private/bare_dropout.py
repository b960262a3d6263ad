"""Dropout on the CPU with a generator given to its draw, which need not be intercepted then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .intercepting import here, include, key


def bare_dropout(layer: nn.Dropout) -> Callable[[Tensor], Tensor]:
    """The forward of a layer, for plain calls of a layer without hooks.

    The operations are those of torch's own dropout, in its order. torch takes several times as
    long to come to a kernel in Python as the draw of a small tensor takes.
    """
    forward = layer.forward

    def dropout(value: Tensor) -> Tensor:
        inner = here.inner
        # torch draws in other ways from nested tensors, and not at all with p = 0 or p = 1.
        if (
            inner is None
            or (own := inner.generator) is None
            or inner._outer is not None
            or type(value) is not Tensor
            or not value.is_cpu
            or value.is_nested
            or layer.inplace
            or not layer.training
            or not 0 < layer.p < 1
        ):
            return forward(value)
        kept = 1 - layer.p
        include(key, False)
        try:
            noise = torch.empty_like(value).bernoulli_(kept, generator=own)
        finally:
            include(key, True)
        return value * noise.div_(kept)

    return dropout

"""The bytes of the best proposals, from a microbatch that runs through their stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .asked import Asked
from .proposal import Proposal
from .search import ProposalSearch


def weighed_finalists(
    asked: Asked, search: ProposalSearch, count: int, tell: Callable[[float], object]
) -> list[Proposal]:
    """The best proposals, of `count` kinds, with the bytes that `pipe.memory` predicts.

    The search composes the bytes of a stage from those of its units, which is a little too much or
    too little for some stages. Proposals that need more than the memory leave the search, and
    others take their places.

    Raises:
        ValueError: none is left.
    """
    weighed: list[Proposal] = []
    while search.best:
        chosen = search.finalists(count)
        light = [one for one in chosen if not any(one is other for other in weighed)]
        if not light:
            return chosen
        for one in light:
            exact = _weighed(asked, one)
            weighed.append(exact)
            search.replace(one, exact if _fits(asked, exact) else None)
            tell(min(len(weighed) / count, 1.0))
    least = min(max(one.peak_bytes) for one in weighed)
    raise ValueError(
        f"memory must be enough for some plan, got {asked.memory_of_each} bytes, where the best "
        f"{len(weighed)} need {least:.0f} or more. Use more devices"
    )


def _fits(asked: Asked, one: Proposal) -> bool:
    memory = asked.memory_of_each
    return memory is None or max(one.peak_bytes) <= memory


def _weighed(asked: Asked, one: Proposal) -> Proposal:
    """With the activations of the pipeline's own stages, where these can be predicted."""
    (args, kwargs), target = asked.batch(asked.rows)
    try:
        with asked.pipeline(one.plan, one.spans, recompute=one.levels) as pipe:
            devices = pipe.memory(*args, target=target, **kwargs).devices
    except torch.OutOfMemoryError:
        # Whether it fits is seen when it runs.
        return one
    found = tuple(device.activations for device in devices if device.activations is not None)
    return replace(one, activation_bytes=found) if len(found) == len(devices) else one

"""How many layers each partition gets, measured."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...partition import partition


def balance_by_time(partitions: int, module: nn.Sequential, sample: Any) -> list[int]:
    """Balances by the time of forward and backward of each layer.

    Args:
        partitions: how many there are to be.
        module: a chain of layers.
        sample: an input of the first layer.

    Returns:
        The number of layers of each partition.

    Raises:
        TypeError, ValueError: as `pykern.partition.partition`.
    """
    return [len(stage) for stage in partition(module, partitions, "time", sample).stages]


def balance_by_size(partitions: int, module: nn.Sequential, sample: Any) -> list[int]:
    """Balances by the bytes of parameters, gradients, Adam's moments, and what forwards keep.

    See `balance_by_time`. The sample is as large as a microbatch.
    """
    return [len(stage) for stage in partition(module, partitions, "memory", sample).stages]

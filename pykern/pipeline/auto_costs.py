"""Costs of stages for `schedule="auto"`, from the layers' times that `balance="time"` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch.distributed import ProcessGroup

from ..parallel.peers.first import of_first
from ..parallel.tensor.tensor import parse_tensor
from ..partition.balance import Partition
from ..partition.bottleneck import balanced_ends
from ..partition.chain import max_stages, open_model, share_out
from ..plan import Costs
from .request import Request

# The most layers of a device whose times are told apart: the segments of a recorded model.
_MOST_OF_A_DEVICE = 16


def options_of(asked: Request, data_group: ProcessGroup | None) -> Mapping[str, Any]:
    """The options of the schedule; for "auto" with measured costs, if the cut is by measured time.

    The first of all processes measures for the others.
    """
    is_measured = asked.schedule == "auto" and asked.balance == "time"
    if not is_measured or "costs" in asked.options:
        return asked.options
    groups = [g for g in (data_group, parse_tensor(asked.tensor_parallel)) if g is not None]
    times = of_first(groups, partial(_measured, asked), Partition).layer_costs
    return {**asked.options, "costs": costs_of(times)}


def costs_of(times_ns: Sequence[int]) -> Callable[[int], Costs]:
    """The costs of any number of stages whose slowest takes the least time.

    Args:
        times_ns: the time of F and B of each layer. F, I and W are taken to be a third each.
    """
    total = [0, *accumulate(times_ns)]

    def costs(num_stages: int) -> Costs:
        ends = [0, *balanced_ends(times_ns, num_stages)]
        thirds = [(total[end] - total[start]) / 3 for start, end in pairwise(ends)]
        return Costs(thirds, [2 * third for third in thirds], 0.0)

    return costs


def _measured(asked: Request) -> Partition:
    most = min(max_stages(asked.model), len(asked.lanes) * _MOST_OF_A_DEVICE)
    chain = open_model(asked.model, asked.sample, most, None, asked.whole)
    # On GPUs too, times are those of the CPU.
    with asked.threads():
        return share_out(chain, 1, "time", asked.sample, None)

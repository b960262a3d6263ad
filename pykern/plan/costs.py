"""The values of `Costs` by name, and costs that differ from others in some of them."""

from __future__ import annotations

from typing import Any

from pykern._C import Costs

# Times of actions, NaN where a time is not known.
TIMES = (
    "forward_ns",
    "backward_ns",
    "recompute_ns",
    "input_ns",
    "weight_ns",
    "update_ns",
    "reduce_ns",
)
# One number, or a list with one for each stage.
STAGE_COSTS = (*TIMES, "message_bytes")
COSTS = (
    *STAGE_COSTS,
    "transfer_ns",
    "overhead_ns",
    "bandwidth",
    "shared_links",
    "overlap",
    "device_speeds",
)


def changed(costs: Costs, **values: Any) -> Costs:
    """Costs with these values instead of their own, and all others as they are."""
    return Costs(**({name: getattr(costs, name) for name in COSTS} | values))

"""Factors by which devices are slower than the others."""

import math
from collections.abc import Sequence


def require_slowdowns(slowdowns: Sequence[float], num_devices: int) -> None:
    """Refuse what is not a factor for each device.

    Raises:
        ValueError: There are too few or too many, or one is below 1 or not finite.
    """
    if len(slowdowns) != num_devices:
        raise ValueError(
            f"slowdowns must hold one for each of the {num_devices} devices of a pipeline, got "
            f"{len(slowdowns)}"
        )
    for slowdown in slowdowns:
        if not 1 <= slowdown < math.inf:
            raise ValueError(
                f"slowdown must be 1 or more, got {slowdown}. 1.2 is a fifth more time for a kernel"
            )

"""Measurements that were never taken, for tests of what is made of them."""

from typing import Any

from pykern.tuning.measurements import SIZES, Measurements
from pykern.tuning.shared_cores import Crowded


def measurements(times: list[float], **changes: Any) -> Measurements:
    """Measurements of units: F takes so many ns a row, B twice, I and W once; 100 bytes a row."""
    sizes = (1, 4)

    def table(factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(factor * time * rows for time in times) for rows in sizes)

    one = tuple(tuple(100.0 * rows for _ in times) for rows in sizes)
    values: dict[str, Any] = {
        "subject": ("cpu", "cpu"),
        "units": tuple(map(str, range(len(times)))),
        "rows": sizes,
        "times_ns": {"F": table(1), "B": table(2), "I": table(1), "W": table(1)},
        "action_ns": dict.fromkeys("FBIW", (0.0,) * len(sizes)),
        "sizes": {
            **dict.fromkeys(SIZES, one),
            "boundary": tuple(tuple(of / 10 for of in row) for row in one),
            "workspace": tuple(tuple(0.0 for _ in row) for row in one),
        },
        "weights": (1000.0,) * len(times),
        "reduce_ns": (1000.0,) * len(times),
        "issue_ns": 0.0,
        "handover_ns": (0.0,) * len(sizes),
        "step_ns": 0.0,
        "setup_ns": 0.0,
        "replica_ns": 0.0,
        "cores": 2,
        "speeds": ((1.0, 1.0),) * len(sizes),
        "crowded": Crowded(),
    }
    return Measurements(**(values | changes))

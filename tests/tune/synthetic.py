"""Measurements that were never taken, for tests of what is made of them."""

from typing import Any

from pykern.tuning.held import FORMS, LEVELS, kinds_of
from pykern.tuning.measurements import Measurements


def measurements(times: list[float], **changes: Any) -> Measurements:
    """Measurements of units: F takes so many ns a row, B twice, I and W once; 100 bytes a row."""
    sizes = (1, 4)

    def table(factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(factor * time * rows for time in times) for rows in sizes)

    def of_each(num_bytes: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(num_bytes * rows for _ in times) for rows in sizes)

    own = {"F": 100.0, "R": 0.0, "B": -100.0, "I": 0.0, "W": -100.0}
    again = own | {"F": 10.0, "R": 90.0}
    values: dict[str, Any] = {
        "subject": ("cpu", "cpu"),
        "units": tuple(map(str, range(len(times)))),
        "rows": sizes,
        "times_ns": {"F": table(1), "B": table(2), "I": table(1), "W": table(1)},
        "action_ns": dict.fromkeys("FBIW", (0.0,) * len(sizes)),
        "sizes": {
            f"{form} {level} {kind.name} {name}": of_each(num_bytes)
            for form in FORMS
            for level in LEVELS
            for kind in kinds_of(form)
            for name, num_bytes in [
                ("own", (own if level == "ops" else again)[kind.name]),
                ("beside", 0.0),
                ("pair", 0.0),
                ("pair beside", 0.0),
            ]
        }
        | {"handed": of_each(100.0)},
        "weights": (1000.0,) * len(times),
        "reduce_ns": (1000.0,) * len(times),
        "issue_ns": 0.0,
        "handover_ns": (0.0,) * len(sizes),
        "step_ns": 0.0,
        "setup_ns": 0.0,
        "replica_ns": 0.0,
        "cores": 2,
        "speeds": ((1.0, 1.0),) * len(sizes),
        "crowded_ns": 0.0,
    }
    return Measurements(**(values | changes))

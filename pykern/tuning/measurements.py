"""Measured costs of a model's units, from which the costs of any stages follow."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import add

from ..plan import Costs, Plan
from ..plan.costs import changed
from ..plan.files.typed_json import from_text

# A value for each number of rows measured, and each unit.
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measurements:
    """Costs of the units of a model, for microbatches of several sizes.

    Between two sizes, costs are on the line through both: t = a + b * rows. Beyond the largest, and
    below the smallest, they are on the nearest line.

    Attributes:
        subject: the devices, and what the model and a row of its batches hold, as text.
        units: the names of the units.
        rows: sizes of microbatches, ascending.
        times_ns: the times of F, B, I and W of a unit that is a stage of its own.
        action_ns: by the same names and by size, the part of the time that an action takes for any
            number of units.
        sizes: bytes that a unit hands to the next one, `handed`, and for each form of backwards,
            recompute level and kind of action, such as `IW ops F`: what the unit holds more behind
            its action, `own`; what it needs meanwhile, `beside`; what it holds more behind the
            action of the unit so many places on, `by 1`; by how much the unit and the next one in
            one stage add more than apart, `pair`; and what they need meanwhile, `pair beside`.
        weights: by unit, the bytes of parameters, buffers, gradients and state of an optimizer.
        reduce_ns: by unit, the time to sum a further replica's gradients.
        issue_ns: the time between two actions of a device.
        handover_ns: by size, the time from an action to one on another device that waits for it.
        step_ns: the time of a step before its first action and after its last.
        setup_ns: the part of step_ns that every action adds.
        replica_ns: the part of step_ns that every further replica adds; infinite where the model
            cannot have any.
        cores: the number of devices that compute at once.
        speeds: by size, of each device while one, two, ... of them compute; the times are of speed
            1. Short actions lose more of their speed, since devices share the interpreter's lock.
        crowded_ns: the time that an action loses where there are more devices than cores, and the
            same for each of its units: both wait for cores and for the interpreter's lock.
    """

    subject: tuple[str, ...]
    units: tuple[str, ...]
    rows: tuple[int, ...]
    times_ns: Mapping[str, Table]
    action_ns: Mapping[str, tuple[float, ...]]
    sizes: Mapping[str, Table]
    weights: tuple[float, ...]
    reduce_ns: tuple[float, ...]
    issue_ns: float
    handover_ns: tuple[float, ...]
    step_ns: float
    setup_ns: float
    replica_ns: float
    cores: int
    speeds: Table
    crowded_ns: float

    def of_units(self, name: str, rows: float) -> list[float]:
        """The times of each unit, in nanoseconds, for a microbatch of `rows` rows."""
        table = self.times_ns.get(name)
        if table is None:
            return [math.nan] * len(self.units)
        return [max(value, 0.0) for value in self._scaled(table, rows)]

    def bytes_of(self, name: str, rows: float) -> list[float]:
        """The bytes of each unit, for a microbatch of `rows` rows."""
        return self._scaled(self.sizes[name], rows)

    def _scaled(self, table: Table, rows: float) -> list[float]:
        if len(self.rows) == 1:
            return [value * rows / self.rows[0] for value in table[0]]
        return self._between(table, rows)

    def handed_ns(self, rows: float) -> float:
        """The time of a hand-over of a microbatch of `rows` rows, in nanoseconds.

        At least 0: a measured one may be less, since the clocks of two GPUs differ a little.
        """
        return self._at(self.handover_ns, rows)

    def once_ns(self, name: str, rows: float) -> float:
        """The part of an action's time that it takes for any number of units, in nanoseconds."""
        return self._at(self.action_ns[name], rows)

    def _at(self, values: Sequence[float], rows: float) -> float:
        """A time measured for each size, for a microbatch of `rows` rows; at least 0."""
        if len(self.rows) == 1:
            return max(values[0], 0.0)
        [between] = self._between(tuple((one,) for one in values), rows)
        return max(between, 0.0)

    def speeds_for(self, rows: float) -> list[float]:
        """The speeds of devices with microbatches of `rows` rows."""
        if len(self.rows) == 1:
            return list(self.speeds[0])
        return self._between(self.speeds, min(max(rows, self.rows[0]), self.rows[-1]))

    def _between(self, table: Table, rows: float) -> list[float]:
        """The values on the lines through those of the two sizes next to `rows`."""
        upper = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        low, high = self.rows[upper - 1], self.rows[upper]
        share = (rows - low) / (high - low)
        pairs = zip(table[upper - 1], table[upper], strict=True)
        return [one + share * (other - one) for one, other in pairs]

    def of_stages(self, name: str, spans: Sequence[range], rows: float) -> list[float]:
        """The time of an action of each stage, in nanoseconds."""
        of_units, once = self.of_units(name, rows), self.once_ns(name, rows)
        return [
            max(sum(of_units[unit] for unit in span) - (len(span) - 1) * once, 0.0)
            for span in spans
        ]

    def costs(self, spans: Sequence[range], rows: float) -> Costs:
        """The costs of stages of these units, in one replica."""
        lost = [self.crowded_ns * (1 + len(span)) for span in spans]
        forwards, backwards, inputs, weights = (
            [*map(add, self.of_stages(name, spans, rows), lost)] for name in "FBIW"
        )
        # The first stage hands no gradient on, so that its W is a whole backward.
        inputs[0] = min(inputs[0], self.of_units("I", rows)[spans[0].start] + 2 * self.crowded_ns)
        weights[0] = backwards[0]
        return Costs(
            forwards,
            backwards,
            self.handed_ns(rows),
            input_ns=inputs,
            weight_ns=weights,
            overhead_ns=self.issue_ns,
        )

    def costs_of(self, plan: Plan, spans: Sequence[range], rows: float) -> Costs:
        """The costs of a plan: those of its stages, and the sums over all of its replicas."""
        further = plan.placement.num_replicas - 1
        reduce_ns = [further * sum(self.reduce_ns[unit] for unit in span) for span in spans]
        return changed(self.costs(spans, rows), reduce_ns=reduce_ns)

    def outside_ns(self, num_actions: int, replicas: int) -> float:
        """The time of a step before its first action and behind its last, in nanoseconds."""
        of_replicas = self.replica_ns * (replicas - 1) if replicas > 1 else 0.0
        return self.step_ns + self.setup_ns * num_actions + of_replicas

    def weights_of(self, spans: Sequence[range]) -> list[float]:
        """By stage, the bytes that are held all the time."""
        return [sum(self.weights[unit] for unit in span) for span in spans]

    def to_json(self) -> str:
        """The measurements as text, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Measurements:
        """The measurements that `to_json` has written.

        Raises:
            ValueError: the text does not hold measurements.
        """
        try:
            found = from_text(cls, text)
            if "B ops F pair" not in found.sizes:
                raise ValueError("sizes must have pairs, got those of an older version")
        except ValueError as error:
            raise ValueError(
                f"measurements must be those of pykern.tune, got another text: {error}. If another "
                "version of pykern wrote the file, delete it to measure again"
            ) from None
        return found

"""Devices and microbatches, shared out among replicas of a model that stand side by side."""

from dataclasses import dataclass

from pykern._C import Plan, with_replicas
from pykern.plan.counts import require_counts


@dataclass(frozen=True)
class Shares:
    """What there is, and how many replicas get a share of it.

    Attributes:
        num_devices: Of all replicas.
        num_microbatches: Of all replicas; None where the plan will say.
        replicas: How many there are, each with as many devices.

    Raises:
        TypeError: A count is not an int.
        ValueError: The devices cannot be shared out evenly, or a replica would have no microbatch.
    """

    num_devices: int
    num_microbatches: int | None
    replicas: int = 1

    def __post_init__(self) -> None:
        require_counts(replicas=self.replicas)
        if self.num_microbatches is not None:
            require_counts(microbatches=self.num_microbatches)
        if self.replicas == 1:
            return
        if self.num_devices % self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, but there are {self.num_devices} devices, which are "
                "not a multiple"
            )
        if self.num_microbatches is not None and self.num_microbatches < self.replicas:
            raise ValueError(
                f"replicas={self.replicas}, but there are {self.num_microbatches} microbatches; "
                "each replica needs one"
            )

    @property
    def devices_of_one(self) -> int:
        """The devices of a replica."""
        return self.num_devices // self.replicas

    @property
    def microbatches_of_one(self) -> int | None:
        """The microbatches of a replica that has the most."""
        if self.num_microbatches is None or self.replicas == 1:
            return self.num_microbatches
        return -(-self.num_microbatches // self.replicas)

    @property
    def whose(self) -> str:
        """Ends a message about what one replica has."""
        return f" for each of {self.replicas} replicas" if self.replicas > 1 else ""

    def side_by_side(self, plan: Plan) -> Plan:
        """The plan of one replica, on all devices."""
        if self.replicas == 1:
            return plan
        return with_replicas(plan, self.replicas, self.num_microbatches)

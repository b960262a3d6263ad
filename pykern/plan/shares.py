"""Shares of devices and microbatches for replicas of a model that run side by side."""

from dataclasses import dataclass

from pykern._C import Plan, with_replicas
from pykern.plan.counts import require_counts


@dataclass(frozen=True)
class Shares:
    """All devices and microbatches, and the number of replicas that share them.

    Attributes:
        num_devices: Number of devices of all replicas together.
        num_microbatches: Number of microbatches of all replicas together; None to take the plan's.
        replicas: Number of replicas; each has the same number of devices.

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
                f"devices must be a multiple of replicas, {self.replicas}, got {self.num_devices}"
            )
        if self.num_microbatches is not None and self.num_microbatches < self.replicas:
            raise ValueError(
                f"microbatches must be at least replicas, {self.replicas}, got "
                f"{self.num_microbatches}. Each replica needs one"
            )

    @property
    def devices_of_one(self) -> int:
        """The number of devices of a replica."""
        return self.num_devices // self.replicas

    @property
    def microbatches_of_one(self) -> int | None:
        """The largest number of microbatches of a replica."""
        if self.num_microbatches is None or self.replicas == 1:
            return self.num_microbatches
        return -(-self.num_microbatches // self.replicas)

    @property
    def whose(self) -> str:
        """The end of a message about the share of one replica."""
        return f" for each of {self.replicas} replicas" if self.replicas > 1 else ""

    def side_by_side(self, plan: Plan) -> Plan:
        """The plan of one replica, on all devices."""
        if self.replicas == 1:
            return plan
        return with_replicas(plan, self.replicas, self.num_microbatches)

"""The cost of one slow GPU among many."""

from dataclasses import dataclass

from pykern.plan.counts import require_numbers
from pykern.scale.cluster import Cluster
from pykern.scale.job import Job
from pykern.scale.mesh import Layout, Mesh
from pykern.scale.predict import predict


@dataclass(frozen=True)
class Straggler:
    """Steps with a slow GPU, at each place of a pipeline in turn.

    Attributes:
        even_ns: The step with equal GPUs.
        steps_ns: By device of the pipeline, the step if that one has the slow GPU.
    """

    even_ns: float
    steps_ns: tuple[float, ...]

    @property
    def worst(self) -> float:
        """How much longer the step is at the worst place, as a share of the even one."""
        return max(self.steps_ns) / self.even_ns - 1

    @property
    def mean(self) -> float:
        """The same on average over all places."""
        return sum(self.steps_ns) / len(self.steps_ns) / self.even_ns - 1


def straggler(
    job: Job, cluster: Cluster, layout: Layout, schedule: str, slowdown: float
) -> Straggler:
    """Simulate a step with one GPU whose kernels take `slowdown` times as long.

    Its shards wait for it within the stage, its pipeline for its stage, and all pipelines for that
    one at the sums of gradients. Sums, messages and the optimizer are as fast as before.

    Args:
        job: The model and batch to train.
        cluster: The boxes.
        layout: How it is spread over them.
        schedule: A name of the catalogue, with its own defaults.
        slowdown: 1 or more.

    Raises:
        ValueError: As from `predict`, or the slowdown is below 1.
    """
    require_numbers(slowdown=slowdown)
    places = range(Mesh(cluster, layout).layout.pipeline)
    return Straggler(
        predict(job, cluster, layout, schedule).step_ns,
        tuple(
            predict(
                job,
                cluster,
                layout,
                schedule,
                [slowdown if place == slow else 1.0 for place in places],
            ).step_ns
            for slow in places
        ),
    )

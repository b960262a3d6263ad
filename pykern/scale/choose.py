"""The best layouts for a number of GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter

from pykern.plan import require_counts
from pykern.scale.cluster import Cluster
from pykern.scale.job import Job
from pykern.scale.mesh import Layout, Mesh
from pykern.scale.predict import (
    Prediction,
    least_ns,
    memory_bytes,
    predict,
    require_predictable,
    state_bytes,
)
from pykern.schedules import by_name

# The share of a GPU's memory for all that is predicted. The rest is assumed for the CUDA context,
# NCCL's buffers, workspaces and what the allocator cannot use.
USABLE = 0.9
# Devices times microbatches from which on a plan is large.
_LARGE = 1 << 16


def layouts(cluster: Cluster, num_gpus: int) -> Iterator[Layout]:
    """All that fill so many GPUs evenly.

    Raises:
        TypeError: The number is not an int.
        ValueError: It is below 1.
    """
    require_counts(num_gpus=num_gpus)
    for tensor in range(1, cluster.box_size + 1):
        for pipeline in range(1, num_gpus // tensor + 1):
            data, rest = divmod(num_gpus, tensor * pipeline)
            if rest:
                continue
            # Not all layouts fill boxes evenly.
            with suppress(ValueError):
                yield Mesh(cluster, Layout(data, tensor, pipeline)).layout


def best(
    job: Job, cluster: Cluster, num_gpus: int, schedules: Sequence[str], top: int
) -> list[Prediction]:
    """The fastest layouts that fit in memory, each with its fastest schedule.

    Args:
        job: The model and batch to train.
        cluster: The boxes.
        num_gpus: How many of their GPUs.
        schedules: Names to choose from.
        top: At most so many layouts, the fastest first.

    Raises:
        ValueError: A schedule is unknown or not predictable.
    """
    require_counts(top=top)
    for schedule in schedules:
        require_predictable(schedule)
    usable = USABLE * cluster.gpu.memory_bytes
    bounds = [
        (least_ns(job, Mesh(cluster, layout)), layout)
        for layout in layouts(cluster, num_gpus)
        if state_bytes(job, layout) <= usable and not job.batch % (layout.data * job.microbatch)
    ]
    found: list[Prediction] = []
    by_time = attrgetter("step_ns")
    for bound_ns, layout in sorted(bounds):
        if len(found) == top and bound_ns > found[-1].step_ns:
            break
        fitting = [
            prediction
            for prediction in _predictions(job, cluster, layout, schedules, usable)
            if prediction.memory_bytes <= usable
        ]
        if fitting:
            found = sorted([*found, min(fitting, key=by_time)], key=by_time)[:top]
    return found


def _may_fit(job: Job, layout: Layout, schedule: str, most_bytes: float) -> bool:
    """Whether a large plan may keep this memory; True for any other plan.

    A simulation of a large plan takes a minute. The rows of a plan alone tell how much it holds,
    and often rows with fewer microbatches do: up to one for each device, no schedule that is
    predicted holds less with more.
    """
    num_microbatches = job.num_microbatches(layout.data)
    if layout.pipeline * num_microbatches < _LARGE or layout.pipeline > job.model.num_layers:
        return True

    def held(count: int) -> float:
        try:
            plan = by_name[schedule](layout.pipeline, count)
        except ValueError:
            # Not for so few, or not for these counts at all.
            return 0.0
        return memory_bytes(job, layout, plan, job.model.parts(plan.num_stages))

    most = min(num_microbatches, layout.pipeline)
    if most > 2:
        one, two = held(1), held(2)
        # So many would be too much if each took as much as the second.
        many = 3 + max(0.0, most_bytes - two) // (two - one) if two > one else most
        if max(one, two, held(int(min(many, most)))) > most_bytes:
            return False
    return held(num_microbatches) <= most_bytes


def _predictions(
    job: Job, cluster: Cluster, layout: Layout, schedules: Sequence[str], usable: float
) -> Iterator[Prediction]:
    """Predictions for the schedules that these counts allow, and that may fit."""
    for schedule in schedules:
        with suppress(ValueError):
            if _may_fit(job, layout, schedule, usable):
                yield predict(job, cluster, layout, schedule)

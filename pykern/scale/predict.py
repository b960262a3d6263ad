"""One step of a layout, simulated."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pykern.plan import (
    Costs,
    Kind,
    Memory,
    Plan,
    Timeline,
    peak_bytes,
    simulate,
    with_reductions,
)
from pykern.plan.costs import by_device
from pykern.plan.counts import require_lists
from pykern.scale.cluster import Cluster
from pykern.scale.job import Job
from pykern.scale.mesh import Layout, Mesh
from pykern.scale.transformer import BFLOAT16_BYTES, Part, of_each
from pykern.scale.work import sums_ns, works
from pykern.schedules import by_name, require_named

# Bytes of a parameter under AdamW in float32, as a loop under autocast has it: parameter, gradient,
# two moments. Its step reads all four and writes all but the gradient.
PARAMETER_BYTES = 4
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
UPDATE_BYTES = 28

_DEFAULTS: Mapping[str, int] = MappingProxyType({})

NOT_PREDICTED = {
    "chimera": "holds two copies of the model",
    "forward_only": "does not train",
    "pipedream": "updates parameters within a step",
    "pipedream_2bw": "updates parameters within a step",
    "seq1f1b": "cuts microbatches into slices",
}


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a step, as far as figures tell.

    Attributes:
        layout: Data, tensor and pipeline parallel.
        schedule: Its name in the catalogue.
        over_boxes: Whether a pipeline needs more than one box.
        num_microbatches: Microbatches of each pipeline.
        step_ns: From the batch to the updated parameters: `makespan_ns`, `exposed_ns`,
            `update_ns` and `gather_ns`, one after the other.
        makespan_ns: Length of the simulated plan.
        bubble_ratio: Share of it in which devices wait, 0 to 1.
        tensor_ns: Time of all-reduces within stages, hidden or not, on the device that has most.
        reduction_ns: Time of gradient sums over pipelines, on the device that has most of them.
        exposed_ns: How much longer the last of them takes than the plan.
        update_ns: The optimizer's step, bound by memory.
        gather_ns: With ZeRO-1, until all processes have the new parameters.
        memory_bytes: On the fullest GPU: parameters, gradients, optimizer, activations at the peak.
        flops_ratio: The model's operations as a share of what the GPUs could do, 0 to 1.
    """

    layout: Layout
    schedule: str
    over_boxes: bool
    num_microbatches: int
    step_ns: float
    makespan_ns: float
    bubble_ratio: float
    tensor_ns: float
    reduction_ns: float
    exposed_ns: float
    update_ns: float
    gather_ns: float
    memory_bytes: float
    flops_ratio: float


def predict(
    job: Job,
    cluster: Cluster,
    layout: Layout,
    schedule: str,
    slowdowns: Sequence[float] = (),
    options: Mapping[str, int] = _DEFAULTS,
) -> Prediction:
    """Simulate one step.

    Reductions are started by the plan's REDUCE actions and run beside what the device computes;
    those of one device follow each other. A pipeline's messages and its reductions do not slow each
    other, smaller pieces are as efficient as larger ones, and no host is too slow.

    Args:
        job: The model and batch to train.
        cluster: The boxes.
        layout: How it is spread over them.
        schedule: A name of the catalogue.
        slowdowns: By device of one pipeline, how many times as long its kernels take; the other
            pipelines wait for it at the sums of gradients. 1 each by default.
        options: The schedule's own, such as {"num_chunks": 3} or {"waves": 2}, where they differ
            from its defaults.

    Raises:
        TypeError: The schedule does not have an option.
        ValueError: The batch, the model or the boxes cannot be divided so, or the schedule is not
            predictable or refuses these counts, or slowdowns are too few, too many, or below 1.
    """
    mesh = Mesh(cluster, layout)
    plan, costs = planned(job, cluster, layout, schedule, slowdowns, options)
    parts = job.model.parts(plan.num_stages)
    timeline = simulate(plan, costs)
    ends_ns, reduction_ns = _reductions(job, mesh, timeline, parts)
    exposed_ns = max(0.0, ends_ns - timeline.makespan_ns)
    sums = of_each(parts, lambda part: sums_ns(job, mesh, part))
    num_passes = 2 + (job.recompute == "layer")
    shares = of_each(parts, lambda part: part.num_parameters / layout.tensor)
    held = max(by_device(plan, shares))
    owned = held / (layout.data if job.zero else 1)
    update_ns = owned * UPDATE_BYTES / cluster.gpu.memory_bytes_per_ns
    gather_ns = mesh.data_ring.all_gather_ns(held * PARAMETER_BYTES) if job.zero else 0.0
    step_ns = timeline.makespan_ns + exposed_ns + update_ns + gather_ns
    return Prediction(
        layout=layout,
        schedule=schedule,
        over_boxes=mesh.over_boxes,
        num_microbatches=plan.num_microbatches,
        step_ns=step_ns,
        makespan_ns=timeline.makespan_ns,
        bubble_ratio=timeline.bubble_ratio,
        tensor_ns=num_passes * plan.num_microbatches * max(by_device(plan, sums)),
        reduction_ns=reduction_ns,
        exposed_ns=exposed_ns,
        update_ns=update_ns,
        gather_ns=gather_ns,
        memory_bytes=memory_bytes(job, layout, plan, parts),
        flops_ratio=model_flops(job) / (layout.num_gpus * cluster.gpu.flops_per_ns * step_ns),
    )


def planned(
    job: Job,
    cluster: Cluster,
    layout: Layout,
    schedule: str,
    slowdowns: Sequence[float] = (),
    options: Mapping[str, int] = _DEFAULTS,
) -> tuple[Plan, Costs]:
    """The plan of one pipeline, and its costs, as `predict` simulates them."""
    require_predictable(schedule)
    mesh = Mesh(cluster, layout)
    num_microbatches = job.num_microbatches(layout.data)
    # A device has a stage or more: too many are refused before a plan for them takes its time.
    job.model.parts(layout.pipeline)
    rule = by_name[schedule](layout.pipeline, num_microbatches, **options)
    plan = with_reductions(rule, over_peers=layout.data > 1)
    return plan, _costs(job, mesh, plan, job.model.parts(plan.num_stages), slowdowns)


def model_flops(job: Job) -> float:
    """Operations of a step, forward and backward."""
    (whole,) = job.model.parts(1)
    return 3 * job.batch * job.model.sequence * (whole.weight_flops + whole.score_flops)


def state_bytes(job: Job, layout: Layout) -> float:
    """Bytes of parameters, gradients and optimizer on a GPU if they are spread evenly."""
    moments = MOMENTS_BYTES / (layout.data if job.zero else 1)
    share = job.model.num_parameters / (layout.tensor * layout.pipeline)
    return share * (PARAMETER_BYTES + GRADIENT_BYTES + moments)


def least_ns(job: Job, mesh: Mesh) -> float:
    """A time that no schedule can beat: all devices busy all the time, nothing to wait for."""
    (whole,) = works(job, mesh, job.model.parts(1))
    num_microbatches = job.num_microbatches(mesh.layout.data)
    return num_microbatches * (whole.forward_ns + whole.backward_ns) / mesh.layout.pipeline


def require_predictable(schedule: str) -> None:
    """Refuse a name that is not a schedule's, or one that this module knows too little about.

    Raises:
        ValueError: The name is unknown, or the schedule does more than train one copy of the model
            in whole microbatches with an update at the end.
    """
    require_named(schedule)
    if schedule in NOT_PREDICTED:
        raise ValueError(
            f"schedule must be one that is predicted, got {schedule!r}, which "
            f"{NOT_PREDICTED[schedule]}"
        )


def _costs(
    job: Job, mesh: Mesh, plan: Plan, parts: list[Part], slowdowns: Sequence[float]
) -> Costs:
    busy = works(job, mesh, parts, _of_stages(slowdowns, plan))
    return Costs(
        [work.forward_ns for work in busy],
        [work.backward_ns for work in busy],
        input_ns=[work.input_ns for work in busy],
        weight_ns=[work.weights for work in busy],
        # Times rather than sizes: boundaries differ in their links, a plan's costs have one speed.
        message_bytes=_message_ns(job, mesh, plan),
        bandwidth=1.0,
        shared_links=True,
    )


def _of_stages(slowdowns: Sequence[float], plan: Plan) -> list[float]:
    """By stage, the factor of its device: shards wait for the slowest, whose sums are as fast."""
    require_lists(slowdowns=slowdowns)
    if not slowdowns:
        return [1.0] * plan.num_stages
    if len(slowdowns) != plan.num_devices:
        raise ValueError(
            f"slowdowns must hold one for each of the {plan.num_devices} devices of a pipeline, "
            f"got {len(slowdowns)}"
        )
    for slowdown in slowdowns:
        if not 1 <= slowdown < math.inf:
            raise ValueError(
                f"slowdown must be 1 or more, got {slowdown}. 1.2 is a fifth more time for a kernel"
            )
    return [slowdowns[plan.placement.device_of(stage)] for stage in range(plan.num_stages)]


def _message_ns(job: Job, mesh: Mesh, plan: Plan) -> list[float]:
    """Time of each stage's output, or its gradient, on the way."""
    num_bytes: float = job.microbatch_tokens * job.model.width * BFLOAT16_BYTES
    if job.sequence_parallel:
        num_bytes /= mesh.layout.tensor
    devices = plan.placement.replicas[0]
    times_ns = []
    for device, other in zip(devices, [*devices[1:], devices[-1]], strict=True):
        link = mesh.link(device, other)
        times_ns.append(link.step_ns + num_bytes / link.bytes_per_ns)
    return times_ns


def _reductions(job: Job, mesh: Mesh, timeline: Timeline, parts: list[Part]) -> tuple[float, float]:
    """When the last one ends, and what those of the device that has most of them take."""
    ring = mesh.data_ring
    takes = ring.reduce_scatter_ns if job.zero else ring.all_reduce_ns
    last_ns = longest_ns = 0.0
    for row in timeline.spans_of(Kind.REDUCE):
        end_ns = total_ns = 0.0
        for span in row:
            num_parameters = parts[span.action.stage].num_parameters
            one_ns = takes(num_parameters / mesh.layout.tensor * GRADIENT_BYTES)
            end_ns = max(end_ns, span.start_ns) + one_ns
            total_ns += one_ns
        last_ns, longest_ns = max(last_ns, end_ns), max(longest_ns, total_ns)
    return last_ns, longest_ns


def memory_bytes(job: Job, layout: Layout, plan: Plan, parts: list[Part]) -> float:
    """Parameters, gradients, optimizer and activations at their peak, on the fullest GPU."""
    moments = MOMENTS_BYTES / (layout.data if job.zero else 1)
    of_parameter = (PARAMETER_BYTES + GRADIENT_BYTES + moments) / layout.tensor
    states = by_device(plan, of_each(parts, lambda part: of_parameter * part.num_parameters))
    of_shards = job.microbatch_tokens, layout.tensor, job.recompute, job.sequence_parallel
    held = of_each(parts, lambda part: part.activation_bytes(*of_shards))
    kept = peak_bytes(plan, Memory(held))
    # While a layer is computed again, all its activations are there.
    again = Part(job.model, int(job.recompute == "layer"), embeds=False, has_head=False)
    layer = again.activation_bytes(*of_shards[:2], sequence_parallel=job.sequence_parallel)
    return max(map(sum, zip(states, kept, strict=True))) + layer

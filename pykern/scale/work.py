"""The times for which a microbatch keeps the GPUs of a stage busy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pykern.scale.job import Job
from pykern.scale.mesh import Mesh
from pykern.scale.transformer import BFLOAT16_BYTES, Part, of_each

# All-reduces of a layer's shards in a forward, and again in a backward: Shoeybi et al.,
# Megatron-LM, 2019, arXiv 1909.08053.
REDUCTIONS_PER_LAYER = 2


class StageWork(NamedTuple):
    """Times in nanoseconds of a microbatch in a stage, on each of its shards.

    Attributes:
        weights: Products with weights, in a forward and in each half of a backward.
        scores: Products of activations in a forward; a backward has twice as many.
        forward: Other kernels of a forward, bound by memory.
        backward: Other kernels of a backward.
        sums: All-reduces of a forward, and those of a backward.
        shown: All-reduces of a backward that run beside no product, if it is not split.
        again: Work that a backward repeats before it begins.
    """

    weights: float
    scores: float
    forward: float
    backward: float
    sums: float
    shown: float
    again: float

    @property
    def forward_ns(self) -> float:
        """A forward."""
        return self.weights + self.scores + self.forward + self.sums

    @property
    def input_ns(self) -> float:
        """The half of a backward that is for inputs."""
        return self.weights + 2 * self.scores + self.backward + self.sums + self.again

    @property
    def backward_ns(self) -> float:
        """A backward that is not split."""
        return self.input_ns + self.weights - self.sums + self.shown


def works(
    job: Job, mesh: Mesh, parts: list[Part], slowdowns: Sequence[float] = ()
) -> list[StageWork]:
    """The work of each stage, whose kernels take so many times as long; 1 each by default."""
    if not slowdowns:
        return of_each(parts, lambda part: _work(job, mesh, part, 1.0))
    return [
        _work(job, mesh, part, slowdown) for part, slowdown in zip(parts, slowdowns, strict=True)
    ]


def sums_ns(job: Job, mesh: Mesh, part: Part) -> float:
    """All-reduces of a microbatch within a stage, one way.

    With sequence parallelism each is a reduce-scatter and an all-gather of as many bytes.
    """
    num_bytes = job.microbatch_tokens * job.model.width * BFLOAT16_BYTES
    return part.num_layers * REDUCTIONS_PER_LAYER * mesh.tensor_ring.all_reduce_ns(num_bytes)


def _work(job: Job, mesh: Mesh, part: Part, slowdown: float) -> StageWork:
    gpu, tokens, tensor = mesh.cluster.gpu, job.microbatch_tokens, mesh.layout.tensor
    flop_ns = slowdown * tokens / (gpu.flops_per_ns * gpu.efficiency * tensor)
    byte_ns = slowdown * tokens / gpu.memory_bytes_per_ns
    forward, backward, of_scores = part.traffic_bytes(tensor, job.sequence_parallel)
    weights, scores = flop_ns * part.weight_flops, flop_ns * part.score_flops
    sums = sums_ns(job, mesh, part)
    again = 0.0
    if job.recompute == "scores":
        again = scores + byte_ns * of_scores
    if job.recompute == "layer":
        layers = replace(part, has_head=False)
        again = flop_ns * layers.weight_flops + scores + byte_ns * forward + sums
    shown = _shown_ns(job, weights, sums)
    return StageWork(weights, scores, byte_ns * forward, byte_ns * backward, sums, shown, again)


def _shown_ns(job: Job, weights: float, sums: float) -> float:
    """All-reduces of a backward that no product for weight gradients hides."""
    if not job.overlap_sums:
        return sums
    # With sequence parallelism gradients of outputs are gathered before there is a product.
    first = sums / 2 if job.sequence_parallel else 0.0
    return first + max(0.0, sums - first - weights)

"""Which GPUs work together: data, tensor and pipeline parallel on boxes."""

from dataclasses import dataclass
from typing import NamedTuple

from pykern.plan import require_counts
from pykern.scale.cluster import Cluster, Link, Ring


class Layout(NamedTuple):
    """Pipelines that share the batch, shards of every stage, devices of a pipeline."""

    data: int
    tensor: int
    pipeline: int

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}x{self.pipeline}"


@dataclass(frozen=True)
class Mesh:
    """A layout on a cluster. A pipeline with all its shards stays together, and shards closest.

    Raises:
        TypeError: A number of the layout is not an int, or the layout or cluster is something else.
        ValueError: One is below 1, or boxes would be filled unevenly.
    """

    cluster: Cluster
    layout: Layout

    def __post_init__(self) -> None:
        for name, kind in (("cluster", Cluster), ("layout", Layout)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}. Give one of "
                    "pykern.scale"
                )
        require_counts(**self.layout._asdict())
        size, box = self.layout.tensor * self.layout.pipeline, self.cluster.box_size
        if box % self.layout.tensor:
            raise ValueError(f"tensor must divide the box, {box} GPUs, got {self.layout.tensor}")
        if box % size and size % box:
            raise ValueError(
                f"tensor x pipeline must divide the box, {box} GPUs, or be a multiple of it, got "
                f"{size}"
            )
        if box % self.layout.num_gpus and self.layout.num_gpus % box:
            raise ValueError(
                f"GPUs must divide the box, {box} GPUs, or be a multiple of it, got "
                f"{self.layout.num_gpus}"
            )

    @property
    def over_boxes(self) -> bool:
        """Whether a pipeline needs more than one box, and with that more than one process."""
        return self.layout.tensor * self.layout.pipeline > self.cluster.box_size

    @property
    def tensor_ring(self) -> Ring:
        """The shards of a stage."""
        return Ring(self.cluster, self.layout.tensor, 1)

    @property
    def data_ring(self) -> Ring:
        """The GPUs that hold the same parameters."""
        num_boxes = max(1, self.layout.num_gpus // self.cluster.box_size)
        return Ring(self.cluster, self.layout.data, min(num_boxes, self.layout.data))

    def link(self, device: int, other: int) -> Link:
        """Between two devices of a pipeline.

        Over boxes, all shards of a box's first and last device are assumed to send at once: an
        upper bound of the time where GPUs divide cards, as a pipeline over boxes has them to
        itself. Messages of one GPU to two others do not slow each other.
        """
        in_a_box = self.cluster.box_size // self.layout.tensor
        if device // in_a_box == other // in_a_box:
            return self.cluster.inside
        return self.cluster.network(min(2, in_a_box) * self.layout.tensor)

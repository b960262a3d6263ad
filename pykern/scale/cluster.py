"""Boxes of GPUs: what they compute, hold and send, by data sheets, and what a collective takes."""

from dataclasses import dataclass

from pykern.plan import require_counts


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        flops_per_ns: Dense operations in bfloat16, at most.
        efficiency: Share of them that products reach, 0 to 1.
        memory_bytes: Size of its memory.
        memory_bytes_per_ns: How fast it reads and writes that; the same number in GB/s.
    """

    flops_per_ns: float
    efficiency: float
    memory_bytes: float
    memory_bytes_per_ns: float


@dataclass(frozen=True)
class Link:
    """From one GPU to another, one way.

    Attributes:
        bytes_per_ns: The same number in GB/s.
        step_ns: Time of a message beyond that of its bytes.
    """

    bytes_per_ns: float
    step_ns: float


@dataclass(frozen=True)
class Cluster:
    """Equal boxes of GPUs.

    Attributes:
        gpu: Each of them.
        box_size: GPUs of a box.
        inside: Between two GPUs of a box.
        between: Between two GPUs of different boxes, each with a network card to itself.
        collective_ns: Time of a collective before its first message.
        cards: Network cards of a box, each within reach of all its GPUs; one per GPU by default.

    Raises:
        TypeError: The cards are not an int.
        ValueError: They are below 1, or more than a box has GPUs.
    """

    gpu: Gpu
    box_size: int
    inside: Link
    between: Link
    collective_ns: float
    cards: int | None = None

    def __post_init__(self) -> None:
        if self.cards is None:
            return
        if not 1 <= self.cards <= self.box_size:
            raise ValueError(
                f"cards must be 1 to {self.box_size}, the GPUs of a box, got {self.cards}. Leave "
                "it out for one per GPU"
            )
        require_counts(cards=self.cards)

    def network(self, num_senders: int) -> Link:
        """Between boxes, for each of so many GPUs of a box that send at once.

        The senders divide the box's cards evenly, and one sender fills one card at most.
        """
        cards = self.box_size if self.cards is None else self.cards
        share = min(1.0, cards / num_senders)
        return Link(share * self.between.bytes_per_ns, self.between.step_ns)


@dataclass(frozen=True)
class Ring:
    """GPUs that call a collective together, each passing on pieces to the next.

    A ring moves (n - 1) / n of the bytes through every GPU for a reduce-scatter or an all-gather,
    which is the least that any way needs, and an all-reduce is one after the other: Patarasuk and
    Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009; Thakur,
    Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005.
    Over boxes, the members of a box each send a part of what leaves it by the network. All rings of
    a box are assumed to run at once. Where GPUs divide cards, this is an upper bound of the time:
    rings of different stages may run one after the other.

    Attributes:
        num_members: GPUs of the group.
        num_boxes: Boxes over which they are spread evenly.
    """

    cluster: Cluster
    num_members: int
    num_boxes: int

    @property
    def bytes_per_ns(self) -> float:
        """Bandwidth of a ring over these GPUs."""
        inside = self.cluster.inside.bytes_per_ns
        if self.num_boxes == 1:
            return inside
        of_a_box = self.num_members / self.num_boxes
        return min(inside, of_a_box * self.cluster.network(self.cluster.box_size).bytes_per_ns)

    def reduce_scatter_ns(self, num_bytes: float) -> float:
        """Until each member has the sum of its piece of so many bytes."""
        return self._collective_ns(num_bytes, rounds=1)

    def all_gather_ns(self, num_bytes: float) -> float:
        """Until each member has all pieces, which are so many bytes together."""
        return self._collective_ns(num_bytes, rounds=1)

    def all_reduce_ns(self, num_bytes: float) -> float:
        """Until each member has the sum of so many bytes."""
        return self._collective_ns(num_bytes, rounds=2)

    def _collective_ns(self, num_bytes: float, rounds: int) -> float:
        if self.num_members == 1:
            return 0.0
        num_steps, num_crossings = self.num_members - 1, self.num_boxes - 1
        round_ns = (
            (num_steps - num_crossings) * self.cluster.inside.step_ns
            + num_crossings * self.cluster.between.step_ns
            + num_steps / self.num_members * num_bytes / self.bytes_per_ns
        )
        return self.cluster.collective_ns + rounds * round_ns


# 989.4 TFLOP/s, 80 GB and 3.35 TB/s, 141 GB and 4.8 TB/s: NVIDIA's data sheets of H100 SXM and
# H200 SXM. That products reach half of it is an assumption; the Llama 3 report, arXiv 2407.21783,
# has 0.38 to 0.43 for whole steps, with all that waits in them.
REACHED = 0.5
_H100 = Gpu(989_400.0, REACHED, 80e9, 3_350.0)
_H200 = Gpu(989_400.0, REACHED, 141e9, 4_800.0)
# 370 of NVLink 4's 450 GB/s: p2pBandwidthLatencyTest on HGX H100, as users have reported it. A card
# of 400 Gb/s for each GPU: NVIDIA's data sheets of DGX H100 and H200. The times of a step and of a
# start are those by which NCCL chooses its algorithms: src/graph/tuning.cc, ring, "Simple".
_NVLINK = Link(370.0, 3_400.0)
NETWORK = Link(50.0, 9_600.0)
COLLECTIVE_NS = 8_400.0

# 312 TFLOP/s, 80 GB and 2,039 GB/s: NVIDIA's data sheet of A100 SXM. With 0.64 the forward of a
# layer takes the 7.7 ms of Korthikanti et al., 2022, arXiv 2205.05198, table 4, "baseline no
# recompute". 232.5 GB/s: all_reduce_perf on eight of them, github.com/NVIDIA/nccl-tests, issue 175.
# Eight cards of 200 Gb/s: both papers of docs/published-rates.md.
_A100 = Gpu(312_000.0, 0.64, 80e9, 2_039.0)

DGX_A100 = Cluster(
    _A100, 8, Link(232.5, _NVLINK.step_ns), Link(25.0, NETWORK.step_ns), COLLECTIVE_NS
)
DGX_H100 = Cluster(_H100, 8, _NVLINK, NETWORK, COLLECTIVE_NS)
DGX_H200 = Cluster(_H200, 8, _NVLINK, NETWORK, COLLECTIVE_NS)
BY_NAME = {"a100": DGX_A100, "h100": DGX_H100, "h200": DGX_H200}

"""A box of a profile, as those that a cluster is made of."""

from itertools import combinations
from typing import TypeVar

from pykern.boxes import Box
from pykern.scale.cluster import COLLECTIVE_NS, NETWORK, REACHED, Cluster, Gpu, Link

T = TypeVar("T")


def cluster_of(box: Box) -> Cluster:
    """Boxes like this one, with a network card of 400 Gb/s for each device.

    A ring is as fast as the slowest link between two devices of the box.

    Raises:
        ValueError: Devices differ, a value that the prediction needs is not known, or two devices
            have no link.
    """
    device = box.devices[0]
    for number, other in enumerate(box.devices):
        if other != device:
            raise ValueError(
                f"devices[{number}] of the box must be like devices[0], got {other.name!r}. Take a "
                "box of equal GPUs"
            )
    gpu = Gpu(
        _known(device.flops_per_ns, "flops_per_ns"),
        REACHED,
        _known(device.memory_bytes, "memory_bytes"),
        _known(device.memory_bytes_per_ns, "memory_bytes_per_ns"),
    )
    links = [
        _known(box.link(*pair), "link between {} and {}".format(*pair))
        for pair in combinations(range(len(box.devices)), 2)
    ]
    slowest = min((link.bytes_per_ns for link in links), default=gpu.memory_bytes_per_ns)
    latency = max((link.latency_ns for link in links), default=0.0)
    return Cluster(gpu, len(box.devices), Link(slowest, latency), NETWORK, COLLECTIVE_NS)


def _known(value: T | None, key: str) -> T:
    if value is None:
        raise ValueError(
            f"the box must tell its {key} for a prediction, got null. Write the figure into the "
            "file, by the data sheet"
        )
    return value

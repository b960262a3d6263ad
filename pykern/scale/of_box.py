"""A box of a profile, as those that a cluster is made of."""

from pykern.boxes import Box, slowest
from pykern.boxes.box import known
from pykern.scale.cluster import COLLECTIVE_NS, NETWORK, REACHED, Cluster, Gpu, Link


def cluster_of(box: Box) -> Cluster:
    """Boxes like this one, with a network card of 400 Gb/s for each device.

    A ring is as fast as the slowest link between two devices of the box. Measured rates of equal
    devices differ a little, and the slowest counts.

    Raises:
        ValueError: Devices differ, a value that the prediction needs is not known, or two devices
            have no link.
    """
    box.require_alike()
    gpu = Gpu(
        min(known(each.flops_per_ns, "flops_per_ns") for each in box.devices),
        REACHED,
        min(known(each.memory_bytes, "memory_bytes") for each in box.devices),
        min(known(each.memory_bytes_per_ns, "memory_bytes_per_ns") for each in box.devices),
    )
    found = slowest(box)
    inside = (
        Link(found.bytes_per_ns, found.latency_ns) if found else Link(gpu.memory_bytes_per_ns, 0.0)
    )
    return Cluster(gpu, len(box.devices), inside, NETWORK, COLLECTIVE_NS)

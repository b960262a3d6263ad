"""Seq1F1B: 1F1B whose items are slices of a microbatch, cut along the sequence."""

from ..plan import Placement, Plan, by_slots, require_counts


def seq1f1b(num_devices: int, num_microbatches: int, num_slices: int = 2) -> Plan:
    """1F1B over slices: the forward slices of a microbatch ascend, its backward slices descend.

    seq1f1b(num_devices=2, num_microbatches=3, num_slices=2), where F and B take one slot each:

        device 0 | 0F0   0F0.1 0F1   .     0B0.1 0F1.1 0B0   0F2   0B1.1 0F2.1 0B1   .     0B2.1 0B2
        device 1 | .     1F0   1F0.1 1B0.1 1F1   1B0   1F1.1 1B1.1 1F2   1B1   1F2.1 1B2.1 1B2   .

    Closed forms (P devices, M microbatches, k slices, d the device, T_F and T_B the forward and
    backward of one microbatch over one device's share; the bubble ratio at T_B = T_F; peak in
    slices; uniform stages and slices, no transfer time):

        makespan       = M * (T_F + T_B) + (P - 1) * (T_F + T_B) / k
        bubble ratio   = (P - 1) / (k * M + P - 1)
        peak in flight = min(P - 1 - d + k, k * M)

    1F1B's bubble divided by the slices, and less memory: a slice holds a k-th of a microbatch.

    Constraints: none. The runtime does not run slices yet. Causal attention lets a slice see the
    ones before it, whose keys and values stay until their backwards, which is why these descend.

    Paper: Sun, Zhao, Han, Yang, Zhang, Liu, Shi, Sun: Seq1F1B: Efficient Sequence-Level Pipeline
    Parallelism for Large Language Model Training, 2024, arXiv 2406.03488.

    Where we differ: slices are taken to be of equal cost; the paper balances their lengths. The
    interleaved variant is not here.

    Args:
        num_devices: Devices, one stage each.
        num_microbatches: Microbatches of one step.
        num_slices: Slices of a microbatch, 256 at most. One gives 1F1B.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, num_slices=num_slices
    )
    return by_slots(
        Placement.linear(num_devices),
        num_microbatches,
        group=1,
        group_offset=2 * num_slices,
        num_slices=num_slices,
    )

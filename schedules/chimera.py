"""Chimera: two replicas of the model in opposite directions, each filling the other's bubbles."""

from ..plan import Placement, Plan, by_slots, require_counts, require_flags


def chimera(num_devices: int, num_microbatches: int, doubling: bool = False) -> Plan:
    """Even microbatches run down the devices, odd ones up, on a second replica of the model.

    chimera(num_devices=4, num_microbatches=4), where F and B take one slot each:

        device 0 | 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2
        device 1 | .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 .
        device 2 | .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 .
        device 3 | 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3

    Closed forms, for P even and M a multiple of P (P devices, M microbatches, d the device, T_F and
    T_B the forward and backward of one microbatch over one stage, T_B at least T_F; the bubble
    ratio at T_B = T_F; uniform stages, no transfer time):

        makespan       = M * (T_F + T_B) + (P - 2) * (T_B + (M / P - 1) * (T_B - T_F))
        bubble ratio   = (P - 2) / (2 * M + P - 2)
        peak in flight = min(P // 2 + 1 + min(d, P - 1 - d), P)

    The second term of the makespan grows with M: with T_B above T_F direct concatenation leaves a
    bubble between the units of P microbatches. Doubling has none there while T_B is at most 2 T_F,
    for twice the peak; for M a multiple of 2 P:

        makespan, doubling = M * (T_F + T_B) + (P - 2) * (T_F + T_B) / 2

    Constraints: P must be even, else the two directions would want the same slots. Other M than
    multiples of P run, with the last unit cut short.

    Paper: Li, Hoefler: Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
    Pipelines, 2021, arXiv 2107.06925, section 3.

    Where we differ: the paper sends the first half of each P microbatches down and the second half
    up, we deal them in turn: a relabelling. For M > P the pattern is repeated (its direct
    concatenation). `doubling` lets two microbatches of a direction take the place of one, their
    forwards back to back, then their backwards. That is the order of its forward doubling, whose
    two forwards are one pass; and of its backward halving, with our microbatches the halves.

    Args:
        num_devices: Devices, one stage of each replica on each.
        num_microbatches: Microbatches of one step.
        doubling: Whether microbatches go in pairs, for M of at least 2 P.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int, or doubling not a bool.
        ValueError: A count is below 1, num_devices is odd, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    require_flags(doubling=doubling)
    if num_devices % 2:
        raise ValueError(f"num_devices must be even for chimera, got {num_devices}")
    return by_slots(
        Placement.bidirectional(num_devices),
        num_microbatches,
        group=num_devices // 2,
        group_offset=2 * num_devices,
        unit=2 if doubling else 1,
    )

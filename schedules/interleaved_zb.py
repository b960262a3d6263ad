"""Interleaved zero bubble: several chunks on every device, and the backward split."""

from ..plan import Placement, Plan, by_phases, require_counts


def interleaved_zb(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """Interleaved 1F1B with half its warm-up skew; device d computes each W d backwards late.

    interleaved_zb(num_devices=2, num_microbatches=2, num_chunks=2), where every action takes one
    slot:

        device 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        device 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

    Closed forms, for M a multiple of P (P devices, M microbatches, v chunks, d the device, T_F, T_I
    and T_W the forward, input gradient and weight gradient of one microbatch over one device's
    share, T_I at least the smaller of T_F and T_W; the bubble ratio at T_F = T_I = T_W; peak in
    chunks, in flight until W; uniform stages, no transfer time):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * (T_I + max(T_F - T_W, 0)) / v
        bubble ratio   = (P - 1) / (3 * v * M + P - 1)
        peak in flight = v * P

    At T_F = T_I = T_W the bubble is only that the devices start one after the other: no order of
    the same placement is shorter. The activations are 1F1B's, for v times the transfers.

    Constraints: none. The microbatches are cut into max(1, M // P) groups of near-equal size, as in
    interleaved.

    Paper: Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2024, arXiv 2401.10241, section
    2.1, on the placement of Narayanan et al., 2021, arXiv 2104.04473.

    Where we differ: the papers do not give this order; it is that of PyTorch's
    ScheduleInterleavedZeroBubble, action for action. PyTorch asks for M a multiple of the number of
    groups, which we do not.

    Args:
        num_devices: Devices, num_chunks stages each.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages on each device. One gives ZB-H1.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    placement = Placement.looped(num_devices, num_chunks)
    num_groups = max(1, num_microbatches // num_devices)
    group = -(-num_microbatches // num_groups)
    num_forwards = num_chunks * num_microbatches
    warmup = [
        min(num_devices - 1 - device + (num_chunks - 1) * group, num_forwards)
        for device in range(num_devices)
    ]
    return by_phases(
        placement, num_microbatches, warmup, group, weight_delay=list(range(num_devices))
    )

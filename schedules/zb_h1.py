"""ZB-H1: 1F1B with its backward split, the weight gradients put where 1F1B idles."""

from ..plan import Placement, Plan, by_phases, require_counts


def zb_h1(num_devices: int, num_microbatches: int) -> Plan:
    """1F1B's order with W apart from I: device d computes each W d input gradients late.

    zb_h1(num_devices=3, num_microbatches=4), where every action takes one slot:

        device 0 | 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        device 1 | .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        device 2 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Closed forms, for M of at least P (P devices, M microbatches, d the device, T_F, T_I and T_W the
    forward, input gradient and weight gradient of one microbatch over one device's share, T_I at
    least the smaller of T_F and T_W; the bubble ratio at T_F = T_I = T_W; in flight until W;
    uniform stages, no transfer time):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * (T_I + max(T_F - T_W, 0))
        bubble ratio   = (P - 1) / (3 * M + P - 1)
        peak in flight = P

    A third of 1F1B's bubble. The delay is what lets every device hold as much as 1F1B's first one.

    Constraints: none. With M below P the bubble is larger.

    Paper: Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2024, arXiv 2401.10241, section
    2.1 and figure 3.

    Where we differ: nowhere. The paper writes B for our I.

    Args:
        num_devices: Devices, one stage each.
        num_microbatches: Microbatches of one step.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    placement = Placement.linear(num_devices)
    warmup = [min(num_devices - 1 - device, num_microbatches) for device in range(num_devices)]
    delay = list(range(num_devices))
    return by_phases(
        placement, num_microbatches, warmup, group=num_microbatches, weight_delay=delay
    )

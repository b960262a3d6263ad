"""ZB-H2: zero bubble in the steady state, for twice the activations of 1F1B."""

from ..plan import Placement, Plan, by_phases, require_counts


def zb_h2(num_devices: int, num_microbatches: int) -> Plan:
    """Twice 1F1B's warm-up, so that no device waits for its first backward; W is twice as late.

    zb_h2(num_devices=3, num_microbatches=5), where every action takes one slot:

        device 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 .   .
        device 1 | .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 .
        device 2 | .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

    Closed forms, for M of at least 2 P - 1 (P devices, M microbatches, d the device, T_F, T_I and
    T_W the forward, input gradient and weight gradient of one microbatch over one device's share,
    T_F at least the smaller of T_I and T_W; the bubble ratio at T_F = T_I = T_W; in flight until W;
    uniform stages, no transfer time):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * (T_F + max(T_I - 2 * T_W, 0))
        bubble ratio   = (P - 1) / (3 * M + P - 1)
        peak in flight = 2 * P - 1

    At T_F = T_I = T_W no device idles between its first action and its last. Only the devices'
    staggered starts remain, which an optimizer step of each device by itself would hide: with one
    step for all, ZB-H1's bubble is as small.

    Constraints: none. M of at least 2 P - 1 is advised, else it is ZB-H1 with later W.

    Paper: Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2024, arXiv 2401.10241, section
    2.2 and figure 3.

    Where we differ: the paper's bubble is that of the longest device, (P - 1) (T_F + T_I - 2 T_W),
    and ours that of the makespan. The paper writes B for our I.

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
    warmup = [
        min(2 * (num_devices - 1 - device), num_microbatches) for device in range(num_devices)
    ]
    delay = [2 * device for device in range(num_devices)]
    return by_phases(
        placement, num_microbatches, warmup, group=num_microbatches, weight_delay=delay
    )

"""Eager 1F1B: 1F1B with a longer warm-up, which hides transfers as long as computation."""

from ..plan import Placement, Plan, by_phases, require_counts


def one_f_one_b_eager(num_devices: int, num_microbatches: int) -> Plan:
    """Each device runs two forwards per device that follows it, then one F and one B in turn.

    one_f_one_b_eager(num_devices=3, num_microbatches=4), where F and B take one slot each:

        device 0 | 0F0 0F1 0F2 0F3 .   0B0 .   0B1 .   0B2 .   0B3
        device 1 | .   1F0 1F1 1F2 1B0 1F3 1B1 .   1B2 .   1B3 .
        device 2 | .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .

    Closed forms (P devices, M microbatches, d the device, T_F and T_B the forward and backward of
    one microbatch over one device's share; the bubble ratio at T_B = T_F; uniform stages, no
    transfer time):

        makespan       = (M + P - 1) * (T_F + T_B)
        bubble ratio   = (P - 1) / (M + P - 1)
        peak in flight = min(2 * (P - d) - 1, M)

    1F1B's bubble for up to twice its memory. Small transfers of T_C add 2 * (P - 1) * T_C, as in
    GPipe, where they add more to 1F1B with every P microbatches.

    Constraints: none.

    Paper: Fan, Rong, Meng, Cao, Wang, Zheng, Wu, Long, Yang, Xia, Diao, Liu, Lin: DAPPLE: A
    Pipelined Data Parallel Approach for Training Large Models, 2021, arXiv 2007.01045 (warm-up B).

    Where we differ: nowhere. Warm-up A is one_f_one_b.

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
    warmup = [
        min(2 * (num_devices - 1 - device), num_microbatches) for device in range(num_devices)
    ]
    placement = Placement.linear(num_devices)
    return by_phases(placement, num_microbatches, warmup, group=num_microbatches)

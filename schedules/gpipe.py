"""GPipe: all forwards, then all backwards."""

from ..plan import Placement, Plan, by_phases, require_counts


def gpipe(num_devices: int, num_microbatches: int) -> Plan:
    """Every device runs all its forwards, then all its backwards.

    gpipe(num_devices=3, num_microbatches=4), where F and B take one slot each:

        device 0 | 0F0 0F1 0F2 0F3 .   .   .   .   0B0 0B1 0B2 0B3
        device 1 | .   1F0 1F1 1F2 1F3 .   .   1B0 1B1 1B2 1B3 .
        device 2 | .   .   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 .   .

    Closed forms (P devices, M microbatches, d the device, T_F and T_B the forward and backward of
    one microbatch over one device's share; the bubble ratio at T_B = T_F; uniform stages, no
    transfer time):

        makespan       = (M + P - 1) * (T_F + T_B)
        bubble ratio   = (P - 1) / (M + P - 1)
        peak in flight = M

    Constraints: none. M of at least 4 P is advised, else the bubble is large.

    Paper: Huang, Cheng, Bapna, Firat, Chen, Chen, Lee, Ngiam, Le, Wu, Chen: GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism, 2019, arXiv 1811.06965, section 2.

    Where we differ: backwards run in ascending microbatch order, so that gradients accumulate in
    the order that every schedule here has; the makespan is that of descending order. Recompute,
    which the paper always uses, is not part of the order.

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
    # A device runs so many forwards before its first backward. The group, which matters where a
    # device has several stages, is all microbatches.
    warmup = [num_microbatches] * num_devices
    return by_phases(placement, num_microbatches, warmup, group=num_microbatches)

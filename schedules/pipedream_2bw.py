"""PipeDream-2BW: 1F1B without a flush, one update for a group of microbatches, two versions."""

from ..plan import Placement, Plan, by_slots, require_counts, with_updates


def pipedream_2bw(num_devices: int, num_microbatches: int, group: int | None = None) -> Plan:
    """1F1B whose groups of microbatches each read the weights of the group before the last one.

    pipedream_2bw(num_devices=2, num_microbatches=6, group=2), in order, without times:

        device 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0U1 0F4 0B3 0F5 0B4 0B5 0U3 0U5
        device 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U1 1F4 1B4 1F5 1B5 1U3 1U5

    Closed forms, for groups of P and M a multiple of P (P devices, M microbatches, d the device,
    T_F and T_B the forward and backward of one microbatch over one device's share; the bubble ratio
    at T_B = T_F; versions of the weights that a device holds; uniform stages, no transfer time):

        makespan        = (M + P - 1) * (T_F + T_B)
        bubble ratio    = (P - 1) / (M + P - 1)
        peak in flight  = min(P - d, M)
        weight versions = min(2, P - d, max(M // P - 1, 1))

    M counts the microbatches of the whole run here, of which each group is a step: there is one
    ramp up and one ramp down, and the bubble ratio goes to zero.

    Constraints: group of at least P; the gradients of a smaller one would not be whole when a later
    group wants them. Group t reads the weights after max(t - 1, 0) updates, on every stage alike: a
    delay of one step. `Pipeline` runs it with `optimizer=`, batch after batch without a flush: see
    docs/asynchronous.md.

    Paper: Narayanan, Phanishayee, Shi, Chen, Zaharia: Memory-Efficient Pipeline-Parallel DNN
    Training, 2021, arXiv 2006.09503, section 3.1.

    Where we differ: an update stands right before the first forward that reads it instead of behind
    its last gradient, so that a forward always reads the newest weights. The gradients of a group
    therefore wait while the next group's first backwards run, which need a sum of their own.

    Args:
        num_devices: Devices, one stage each.
        num_microbatches: Microbatches of all groups; the last group may be shorter.
        group: Microbatches of one update. Default: num_devices.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, group is below num_devices, or the plan too large.
    """
    if group is None:
        group = num_devices
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches, group=group)
    if group < num_devices:
        raise ValueError(f"group must be at least num_devices, {num_devices}, got {group}")
    plan = by_slots(Placement.linear(num_devices), num_microbatches, group=1, group_offset=2)
    return with_updates(plan, group, delay=2)

"""PipeDream: 1F1B without a flush, the weights updated after every microbatch."""

from ..plan import Placement, Plan, by_slots, require_counts, with_updates


def pipedream(num_devices: int, num_microbatches: int) -> Plan:
    """1F1B with an update behind every backward: a forward reads what the last one wrote.

    pipedream(num_devices=2, num_microbatches=4), in order, without times:

        device 0 | 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 0U2 0B3 0U3
        device 1 | 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 1F3 1B3 1U3

    Closed forms (P devices, M microbatches, d the device, T_F and T_B the forward and backward of
    one microbatch over one device's share; the bubble ratio at T_B = T_F; versions of the weights
    that a device holds; uniform stages, no transfer time):

        makespan        = (M + P - 1) * (T_F + T_B)
        bubble ratio    = (P - 1) / (M + P - 1)
        peak in flight  = min(P - d, M)
        weight versions = min(P - d, M, max(M - P + d, 0) + 2)

    M counts the microbatches of the whole run here, of which each is a step of its own: there is
    one ramp up and one ramp down, and the bubble ratio goes to zero.

    Constraints: none. It is not equal to training microbatch by microbatch: a forward on device d
    reads weights that lack the gradients of the P - 1 - d microbatches before its own. `Pipeline`
    runs it with `optimizer=`, batch after batch without a flush: see docs/asynchronous.md.

    Paper: Harlap, Narayanan, Phanishayee, Seshadri, Devanur, Ganger, Gibbons: PipeDream: Fast and
    Efficient Pipeline Parallel DNN Training, 2018, arXiv 1806.03377, section 3.

    Where we differ: one stage is on one device; the paper's planner may give a stage several. A
    backward reads the version that its forward read (weight stashing); which one that was follows
    from the order alone.

    Args:
        num_devices: Devices, one stage each.
        num_microbatches: Microbatches, each with an update of its own.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    plan = by_slots(Placement.linear(num_devices), num_microbatches, group=1, group_offset=2)
    return with_updates(plan, group=1, delay=0)

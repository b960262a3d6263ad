"""1F1B: a backward as early as possible, then one forward and one backward in turn."""

from ..plan import Placement, Plan, by_slots, require_counts


def one_f_one_b(num_devices: int, num_microbatches: int) -> Plan:
    """Each device runs as many forwards as devices follow it, then one F and one B in turn.

    one_f_one_b(num_devices=3, num_microbatches=4), where F and B take one slot each:

        device 0 | 0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
        device 1 | .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .
        device 2 | .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .

    Closed forms (P devices, M microbatches, d the device, T_F and T_B the forward and backward of
    one microbatch over one device's share; the bubble ratio at T_B = T_F; uniform stages, no
    transfer time):

        makespan       = (M + P - 1) * (T_F + T_B)
        bubble ratio   = (P - 1) / (M + P - 1)
        peak in flight = min(P - d, M)

    GPipe's bubble in a memory that does not grow with M.

    Constraints: none.

    Paper: Narayanan, Phanishayee, Shi, Chen, Zaharia: Memory-Efficient Pipeline-Parallel DNN
    Training, 2021, arXiv 2006.09503 (PipeDream-Flush); the same order as Fan et al.: DAPPLE: A
    Pipelined Data Parallel Approach for Training Large Models, 2021, arXiv 2007.01045 (warm-up A).

    Where we differ: nowhere. It is the lattice rule with a new microbatch in every second slot.

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
    return by_slots(Placement.linear(num_devices), num_microbatches, group=1, group_offset=2)

"""V-Half: half of 1F1B's activations, on stages that run down the devices and back up."""

from ..plan import Placement, Plan, by_block, require_counts, require_flags


def v_half(num_devices: int, num_microbatches: int, early: bool = False) -> Plan:
    """One microbatch's timetable repeated every 6 slots; forwards go down at half speed.

    v_half(num_devices=2, num_microbatches=3), where every action takes one slot:

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
        device 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Closed forms, for M of at least 2 P (P devices, M microbatches, d the device, T_F the forward of
    one microbatch over one device's share, T_I = T_W = T_F; peak in chunks, 2 to a device, in
    flight until W; uniform stages, no transfer time):

        makespan       = 3 * M * T_F + max(P - 1, 3 * P - 7 + P % 2 * (P + 5) / 2) * T_F / 2
        bubble ratio   = 1 - 6 * M / (6 * M + max(P - 1, 3 * P - 7 + P % 2 * (P + 5) / 2))
        peak in flight = 2 * (P // 2 + 1)

    From P = 4 on with an even P, no order of this placement is shorter in this memory: the bound
    is 6 M + 6 P - 1 slots of a chunk, less 3 for each chunk of memory. At other times than
    T_F = T_I = T_W the timetable need not close up, and the bubble may grow with M.

    Constraints: without `early` W keeps its place in the period up to a device's last F. With it F
    and I go in front of any W that the memory lets wait: (P - 1) / 2 slots less for an odd P at
    equal times, where it meets the bound too, and at others often much more time. With M below 2 P
    it runs with less memory or a larger bubble ratio.

    Paper: Qi, Wan, Amar, Lin: Pipeline Parallelism with Controllable Memory,
    2024, arXiv 2405.15362, table 1.

    Where we differ: how warm-up and cool-down close up. We move each action, in the order of the
    slots, to the first idle one that keeps inputs and peak, and behind the last F of a device also
    in front of W; the paper's squeeze keeps the order, and its code then improves it with a greedy
    pass.

    Args:
        num_devices: Devices, two stages each.
        num_microbatches: Microbatches of one step.
        early: Move F and I in front of W at all times.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int, or early not a bool.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    require_flags(early=early)
    placement = Placement.wave(num_devices, waves=1)
    down, up = range(num_devices), range(num_devices, 2 * num_devices)
    forward_slots = [2 * stage for stage in down] + [num_devices - 1 + stage for stage in up]
    gap = 0 if num_devices % 2 else 3  # keeps the slots of a device apart
    turn = 6 * num_devices - 2 + gap
    input_slots = [turn - stage for stage in down]
    input_slots += [turn + num_devices - 1 - 2 * stage for stage in up]
    return by_block(placement, num_microbatches, forward_slots, input_slots, 6, not early)

"""V-Min: a third of 1F1B's activations, on stages that run down the devices and back up."""

from ..plan import Placement, Plan, by_block, require_counts


def v_min(num_devices: int, num_microbatches: int) -> Plan:
    """One microbatch as fast as it can go, down and up and back, repeated every 6 slots.

    v_min(num_devices=2, num_microbatches=3), where every action takes one slot:

        device 0 | 0F0 0F1 .   3F0 3I0 3F1 3I1 0I0 3W0 0F2 0I1 3W1 0W0 3F2 3I2 0W1 3W2 0I2 0W2
        device 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1F2 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Closed forms, for M of at least P (P devices, M microbatches, d the device, T_F the forward of
    one microbatch over one device's share, T_I = T_W = T_F; peak in chunks, 2 to a device, in
    flight until W; uniform stages, no transfer time):

        makespan       = 3 * M * T_F + max(P - 1, 4 * P - 7 + 2 * (P % 3 == 1)) * T_F / 2
        bubble ratio   = 1 - 6 * M / (6 * M + max(P - 1, 4 * P - 7 + 2 * (P % 3 == 1)))
        peak in flight = 2 * ((P + 4) // 3)

    From P = 3 on this is the shortest order of this placement in this memory, but where P mod 3 is
    2, which is 2 slots of a chunk off the bound. At other times than T_F = T_I = T_W the timetable
    no longer closes up, and the bubble grows with M.

    Constraints: none. With M below P it runs with less memory and a larger bubble ratio.

    Paper: Qi, Wan, Amar, Lin: Pipeline Parallelism with Controllable Memory,
    2024, arXiv 2405.15362, table 1.

    Where we differ: how warm-up and cool-down close up, as in v_half.

    Args:
        num_devices: Devices, two stages each.
        num_microbatches: Microbatches of one step.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    placement = Placement.wave(num_devices, waves=1)
    stages = range(2 * num_devices)
    gap = 0 if num_devices % 3 else 2  # keeps the slots of a device apart
    input_slots = [4 * num_devices - 1 + gap - stage for stage in stages]
    return by_block(placement, num_microbatches, list(stages), input_slots, interval=6)

"""ZB-V: no bubble in the steady state at 1F1B's memory, on stages that run down and back up."""

from ..plan import Placement, Plan, by_program, require_counts


def zb_v(num_devices: int, num_microbatches: int) -> Plan:
    """Two chunks a device in a V: the first and the last stage are on device 0.

    zb_v(num_devices=2, num_microbatches=3), where every action takes one slot:

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        device 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Closed forms, for M of at least 2 P - 1 (P devices, M microbatches, d the device, T_F, T_I and
    T_W the forward, input gradient and weight gradient of one microbatch over one device's share,
    T_I at least T_F and T_W; the bubble ratio at T_F = T_I = T_W; peak in chunks, 2 to a device, in
    flight until W; uniform stages, no transfer time):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * max(T_I, 2 * (T_I - T_W)) / 2
        bubble ratio   = (P - 1) / (6 * M + P - 1)
        peak in flight = 2 * P

    At T_F = T_I = T_W no device idles between its first action and its last.

    Constraints: none. With M below 2 P - 1 the same order runs without the microbatches that are
    not there.

    Paper: Qi, Wan, Huang, Lin: Zero Bubble Pipeline Parallelism, 2024, arXiv 2401.10241, section 6
    (ZB-V); placed in a family by Qi, Wan, Amar, Lin: Pipeline Parallelism with Controllable Memory,
    2024, arXiv 2405.15362.

    Where we differ: the order is the handcrafted one for equal times, that of PyTorch's
    ScheduleZBVZeroBubble, action for action; the authors' code searches one for the times given.

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
    steady = max(num_microbatches - num_devices, num_devices - 1)
    programs = [
        [
            (2 * before_turn - 1, "F0"),
            (device, "F1 F0"),
            (before_turn, "F1 I1 W1"),
            (steady, "F0 I0 W0 F1 I1 W1"),
            (device, "I0 I1"),
            (before_turn, "I0 W0"),
            (device, "W1"),
            (device, "W0"),
        ]
        for device, before_turn in enumerate(range(num_devices, 0, -1))
    ]
    return by_program(Placement.wave(num_devices, waves=1), num_microbatches, programs)

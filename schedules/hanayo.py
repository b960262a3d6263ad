"""Hanayo: the stages run down the devices and back up, in waves, on one copy of the model."""

from ..plan import Placement, Plan, by_list, by_slots, require_counts, require_flags


def hanayo(
    num_devices: int, num_microbatches: int, waves: int = 1, optimised: bool = False
) -> Plan:
    """Microbatches run down the devices and back up, `waves` times, and turn without a transfer.

    hanayo(num_devices=2, num_microbatches=2, waves=1), where F and B take one slot each:

        device 0 | 0F0 0F1 .   3F0 3B0 3F1 3B1 0B0 .   0B1
        device 1 | .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 .

    Closed forms, for M a multiple of P (P devices, M microbatches, W waves, d the device, T_F and
    T_B the forward and backward of one microbatch over one device's share, T_B at least T_F; the
    bubble ratio at T_B = T_F; peak in chunks, 2 W to a device; uniform stages, no transfer time):

        makespan       = M * (T_F + T_B) + (P - 1) * (T_B + (M / P - 1) * (T_B - T_F)) / W
        bubble ratio   = (P - 1) / (2 * M * W + P - 1)
        peak in flight = (2 * W - 1) * P + 1 + d

    The first and the last stage are on device 0. At M = P and T_B = 2 T_F an exact solver found no
    faster order in the six cases tried. With M > P and T_B > T_F the idle time between the waves
    grows with M. The optimised order lets a wave enter while the one before it turns, and fills
    every device to what device P - 1 holds; for M of 2 P, 3 P and so on:

        makespan, optimised       = M * (T_F + T_B) + (P - 1) * (T_B + T_F / 2) / W
        peak in flight, optimised = 2 * W * P

    It is the faster one where (M / P - 1) * (T_B - T_F) > T_F / 2; for M up to P it is the strict.

    Constraints: none. Other M than multiples of P run, with the last wave front cut short.

    Paper: Liu, Cheng, Zhou, You: Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced
    Large Model Training Efficiency, 2023, arXiv 2308.15762, section 3 and figures 3 and 6.

    Where we differ: the order is that of the paper's figures. Its equation (1) is not their bubble
    (it has T_B / (2 W) where the drawn schedule idles T_B / W), so the forms above are of the drawn
    one. For M > P, which the paper leaves open, the pattern of P microbatches is repeated. The
    optimised order is ours: the same queues, a wave every 2 W P slots instead of every 4 W P, and
    each forward as early as it can start.

    Args:
        num_devices: Devices, 2 * waves stages each.
        num_microbatches: Microbatches of one step.
        waves: Times that a forward runs down the devices and back up.
        optimised: Whether, for M > P, waves follow each other without a gap.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int, or optimised not a bool.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches, waves=waves)
    require_flags(optimised=optimised)
    placement = Placement.wave(num_devices, waves)
    num_stages = placement.num_stages
    if not optimised or num_microbatches <= num_devices:
        return by_slots(placement, num_microbatches, num_devices, group_offset=2 * num_stages)
    order = by_slots(placement, num_microbatches, num_devices, group_offset=num_stages)
    return by_list(order, cap=num_stages)

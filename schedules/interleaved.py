"""Interleaved 1F1B: several chunks on every device; the bubble shrinks with their number."""

from ..plan import Placement, Plan, by_phases, require_counts


def interleaved(
    num_devices: int, num_microbatches: int, num_chunks: int = 2, group: int | None = None
) -> Plan:
    """1F1B over several chunks per device, the stages dealt round and round the devices.

    interleaved(num_devices=2, num_microbatches=4, num_chunks=2), where F and B take one slot each:

        device 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        device 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Closed forms, for M a multiple of P (P devices, M microbatches, v chunks, d the device, T_F and
    T_B the forward and backward of one microbatch over one device's share, T_B at least T_F; the
    bubble ratio at T_B = T_F; peak in chunks; uniform stages, no transfer time):

        makespan       = M * (T_F + T_B) + (P - 1) * (T_F + T_B) / v
        bubble ratio   = (P - 1) / (v * M + P - 1)
        peak in flight = min(2 * (P - 1 - d) + (v - 1) * P + 1, v * M)

    The bubble is 1F1B's divided by v, for v times the transfers and a little more memory. With
    groups of N, M a multiple of N, the peak has (v - 1) * N for its (v - 1) * P, and transfers cost
    less.

    Constraints: group of at least P. The microbatches are cut into max(1, M // group) groups of
    near-equal size, and every device passes a group through one chunk before the next. For M a
    multiple of the group the order is Megatron's to the action.

    Paper: Narayanan, Shoeybi, Casper, LeGresley, Patwary, Korthikanti, Vainbrand, Kashinkunti,
    Bernauer, Catanzaro, Phanishayee, Zaharia: Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, 2021, arXiv 2104.04473, section 2.2.

    Where we differ: the paper asks for M a multiple of P; other M run here too, with the warm-up
    counted from the largest group, because groups of P with a short last one can deadlock.

    Args:
        num_devices: Devices, num_chunks stages each.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages on each device. One gives 1F1B with the longer of DAPPLE's warm-ups.
        group: Microbatches that pass through one chunk before the next, at least (Megatron's
            microbatch group size). Default: num_devices.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, group is below num_devices, or the plan too large.
    """
    if group is None:
        group = num_devices
    require_counts(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group=group,
    )
    if group < num_devices:
        raise ValueError(f"group must be at least num_devices, {num_devices}, got {group}")
    placement = Placement.looped(num_devices, num_chunks)
    largest = -(-num_microbatches // max(1, num_microbatches // group))
    num_forwards = num_chunks * num_microbatches
    warmup = [
        min(2 * (num_devices - 1 - device) + (num_chunks - 1) * largest, num_forwards)
        for device in range(num_devices)
    ]
    return by_phases(placement, num_microbatches, warmup, largest)

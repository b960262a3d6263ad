"""Group-interleaved: chunks in groups smaller than the devices, for less memory."""

from ..plan import Placement, Plan, by_phases, require_counts


def gis(
    num_devices: int, num_microbatches: int, num_chunks: int = 2, group: int | None = None
) -> Plan:
    """Interleaved with the backward split, W right behind I, and a group size that saves memory.

    gis(num_devices=2, num_microbatches=2, num_chunks=2), where every action takes one slot:

        device 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 .   2I1 2W1 0I0 0W0 0I1 0W1
        device 1 | .   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1 .

    Closed forms, for groups of P and M a multiple of P (P devices, M microbatches, v chunks, d the
    device, T_F, T_I and T_W the forward, input gradient and weight gradient of one microbatch over
    one device's share; the bubble ratio at T_F = T_I = T_W; peak in chunks, in flight until W;
    uniform stages, no transfer time):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * (T_F + T_I) / v
        bubble ratio   = 2 * (P - 1) / (3 * v * M + 2 * (P - 1))
        peak in flight = v * P - d

    For groups of g < P, and M a multiple of g, the peak is (v - 1) g + P - d chunks. The bubble has
    (v - 1) (P - g) more slots of a chunk at T_F = T_I = T_W. Groups of P / 2 are the paper's GIS-H.

    Constraints: group from P / 2, rounded up, to P. With smaller ones a device waits for a forward
    that stands behind a backward of its own; larger ones only hold more. The microbatches are cut
    into max(1, M // group) groups of near-equal size.

    Paper: Wan, Qi, Huang, Li, Lin: PipeOffload: Improving Scalability of Pipeline Parallelism with
    Memory Optimization, 2025, arXiv 2503.01328.

    Where we differ: nothing is offloaded; this is the order alone. The paper writes B for our I.

    Args:
        num_devices: Devices, num_chunks stages each.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages on each device.
        group: Microbatches that pass one chunk before the next; num_devices where not given.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, the group out of its range, or the plan too large.
    """
    if group is None:
        group = num_devices
    require_counts(
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group=group,
    )
    least = -(-num_devices // 2)
    if not least <= group <= num_devices:
        raise ValueError(
            f"group must be {least} to {num_devices} for num_devices={num_devices}, got {group}"
        )
    size = -(-num_microbatches // max(1, num_microbatches // group))
    num_forwards = num_chunks * num_microbatches
    warmup = [
        min(num_devices - 1 - device + (num_chunks - 1) * size, num_forwards)
        for device in range(num_devices)
    ]
    placement = Placement.looped(num_devices, num_chunks)
    return by_phases(placement, num_microbatches, warmup, size, weight_delay=[0] * num_devices)

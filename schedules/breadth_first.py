"""Breadth-first: all microbatches through one chunk before the next, as GPipe does with one."""

from ..plan import Placement, Plan, by_phases, require_counts


def breadth_first(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Plan:
    """Every device passes all microbatches through a chunk before the next, forwards first.

    breadth_first(num_devices=2, num_microbatches=3, num_chunks=2), where F and B take one slot
    each:

        device 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   .   2B0 2B1 2B2 0B0 0B1 0B2
        device 1 | .   1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 .

    Closed forms, for M of at least P (P devices, M microbatches, v chunks, d the device, T_F and
    T_B the forward and backward of one microbatch over one device's share; the bubble ratio at
    T_B = T_F; peak in chunks; uniform stages, no transfer time):

        makespan       = M * (T_F + T_B) + (P - 1) * (T_F + T_B) / v
        bubble ratio   = (P - 1) / (v * M + P - 1)
        peak in flight = v * M

    Interleaved's bubble, for memory that grows with M. A chunk's weights are used in one go in each
    direction, and its gradients are whole while later backwards still run. For M of 2 P and more,
    small transfers of T_C add 2 * (P - 1) * T_C, as in GPipe, whatever the number of chunks.

    Constraints: none. With M below P the bubble is larger.

    Paper: Lamy-Poirier: Breadth-First Pipeline Parallelism, 2023, arXiv 2211.05953.

    Where we differ: backwards run in ascending microbatch order within a chunk, as in our gpipe, so
    that gradients accumulate in the order that every schedule here has.

    Args:
        num_devices: Devices, num_chunks stages each.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages on each device. One gives GPipe.

    Returns:
        The checked plan.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, or the plan too large.
    """
    require_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    placement = Placement.looped(num_devices, num_chunks)
    warmup = [num_chunks * num_microbatches] * num_devices
    return by_phases(placement, num_microbatches, warmup, group=num_microbatches)

"""Forward only: the stream of inference, several chunks on every device if wanted."""

from ..plan import Placement, Plan, by_phases, require_counts


def forward_only(num_devices: int, num_microbatches: int, num_chunks: int = 1) -> Plan:
    """Every device runs the forwards of its chunks as they come, and no backward.

    forward_only(num_devices=2, num_microbatches=4, num_chunks=2), where F and B take one slot each:

        device 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3 .
        device 1 | .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

    Closed forms, for M a multiple of P (P devices, M microbatches, v chunks, T_F the forward of one
    microbatch over one device's share; uniform stages, no transfer time):

        makespan       = M * T_F + (P - 1) * T_F / v
        bubble ratio   = (P - 1) / (v * M + P - 1)

    Nothing is in flight between two stages but what a transfer carries: no backward will need it.

    Constraints: none. The microbatches are cut into max(1, M // P) groups of near-equal size, and
    every device passes a group through one chunk before the next.

    Paper: Huang, Cheng, Bapna, Firat, Chen, Chen, Lee, Ngiam, Le, Wu, Chen: GPipe: Efficient
    Training of Giant Neural Networks using Pipeline Parallelism, 2019, arXiv 1811.06965, section 2,
    for one chunk.

    Where we differ: it is the forward half; with chunks, of our interleaved.

    Args:
        num_devices: Devices, num_chunks stages each.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages on each device.

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
    num_groups = max(1, num_microbatches // num_devices)
    warmup = [num_chunks * num_microbatches] * num_devices
    group = -(-num_microbatches // num_groups)
    return by_phases(placement, num_microbatches, warmup, group).forward_only()

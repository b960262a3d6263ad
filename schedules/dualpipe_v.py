"""DualPipeV: forwards overlapped with backwards, on stages that run down the devices and back."""

from ..plan import Placement, Plan, by_program, require_counts


def dualpipe_v(num_devices: int, num_microbatches: int) -> Plan:
    """DualPipe cut in half: in the steady state each F of one chunk shares a slot with a B.

    dualpipe_v(num_devices=2, num_microbatches=4), where every action takes one slot:

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 .   3F3 0B1 3B3 0I2 0W2 0I3 0W3
        device 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 .   2I3 1I3 2W3 1W3

    where on device 0 the pairs 0F3 3B1, 3F2 0B0 and 3F3 0B1, on device 1 2F2 1B0, 1F3 2B1 and
    2F3 1B1, each share a slot that is as long as two.

    Closed forms (P devices, M microbatches, d the device, T_F, T_I and T_W the forward, input
    gradient and weight gradient of one microbatch over one device's share, T_I = T_F and T_W no
    longer; the bubble ratio at T_F = T_I = T_W; peak in chunks, 2 to a device, in flight until W;
    uniform stages, no transfer time, and nothing gained by overlapping):

        makespan       = M * (T_F + T_I + T_W) + (P - 1) * (T_F + 2 * T_I - T_W) / 2
        bubble ratio   = (P - 1) / (3 * M + P - 1)
        peak in flight = 2 * P + 1

    It is for pairs that take less time than their two actions, one of which communicates while the
    other computes. Where they do not, ZB-V has half the bubble in less memory.

    Constraints: M of at least 2 P.

    Paper: DeepSeek-AI: DeepSeek-V3 Technical Report, 2024, arXiv 2412.19437, section 3.2.1; cut in
    half by Sea AI Lab, as the DualPipe repository says.

    Where we differ: nowhere; the order is PyTorch's ScheduleDualPipeV, action for action. Backwards
    are whole but where the split shortens the warm-up and the cool-down.

    Args:
        num_devices: Devices, two stages each.
        num_microbatches: Microbatches of one step, at least 2 * num_devices.

    Returns:
        The checked plan, with its overlapped pairs.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, num_microbatches below 2 * num_devices, or the plan too
            large.
    """
    require_counts(num_devices=num_devices, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_devices:
        raise ValueError(
            f"num_microbatches must be at least 2 * num_devices = {2 * num_devices}, "
            f"got {num_microbatches}"
        )
    programs = [
        _program(device, num_devices - 1 - device, num_microbatches - 2 * num_devices)
        for device in range(num_devices)
    ]
    return by_program(Placement.wave(num_devices, waves=1), num_microbatches, programs)


def _program(before: int, after: int, beyond: int) -> list[tuple[int, str]]:
    """Phases of a device: devices before and after it, and microbatches beyond 2 P."""
    # The last device computes its first pair one after the other, which shortens the bubble.
    first = "F0&B1 F1&B0" if after else "F0 B1 F1&B0"
    whole, odd = divmod(before + 1, 2)
    return [
        (2 * after, "F0"),
        (before + 1, "F0 F1"),
        (after, "I1 W F1"),
        (1, first),
        (beyond + before, "F0&B1 F1&B0"),
        (after, "B1 F1&B0"),
        (whole, "B1 B0"),
        (odd, "B1 I0"),
        (whole, "I1 I0"),
        (after, "W I0"),
        (before + 1, "W"),
    ]

"""Peak memory of a plan in words that do not depend on a model."""

from ..plan import Kind, Memory, Plan, peak_bytes

# On one line; half of them are the first, the others the last.
MOST_NUMBERS = 64


def peaks_in_shares(plan: Plan, *, input_frees: bool = False) -> list[float]:
    """Most that each device holds, in activations of a microbatch over a device's share.

    Args:
        plan: One that passes `check`.
        input_frees: Whether I releases everything, rather than W.

    Returns:
        A number for each device.
    """
    share = plan.num_devices / plan.num_stages
    return peak_bytes(plan, Memory(share, 0.0 if input_frees else share))


def peaks_in_words(plan: Plan) -> str:
    """A line about them, with both rules of release where the plan has two halves of a backward."""
    inputs = ", without the inputs of what is recomputed" if plan.has(Kind.R) else ""
    start = f"peak memory, in activations of a device's share{inputs}, from device 0 on: "
    if not plan.has(Kind.W):
        return start + numbers(peaks_in_shares(plan))
    held, least = peaks_in_shares(plan), peaks_in_shares(plan, input_frees=True)
    return f"{start}{numbers(held)} if W frees, {numbers(least)} if I frees"


def numbers(values: list[float]) -> str:
    """With as few digits as they need; of more than anybody reads the first, the last, the most."""
    words = [f"{value:.3g}" for value in values]
    if len(words) <= MOST_NUMBERS:
        return " ".join(words)
    half = MOST_NUMBERS // 2
    return f"{' '.join(words[:half])} ... {' '.join(words[-half:])}, {max(values):.3g} at most"

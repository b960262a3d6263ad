"""The demo's sample: bytes drawn from the trained model, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: bytes,
    num_bytes: int,
    context: int,
    temperature: float,
    seed: int,
) -> bytes:
    """Continue a prompt; the same seed gives the same continuation.

    Args:
        model: Ids [1, seq], int64 -> logits [1, seq, 256].
        prompt: At least one byte.
        num_bytes: Bytes to add.
        context: Longest sequence that the model takes; older bytes are dropped.
        temperature: Above 0; lower is less surprising.
        seed: Seed of the draws.

    Returns:
        The prompt and what follows it.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    with torch.no_grad():
        for _ in range(num_bytes):
            logits = model(torch.tensor([list(text[-context:])]))[0, -1].cpu()
            chances = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)


def printable(text: bytes) -> str:
    """Text that is safe on a terminal: what is neither printable nor a line end shows as U+FFFD."""
    decoded = text.decode("utf-8", errors="replace").expandtabs(4)
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded
    )

"""Philox, a random function of a seed and a place, in plain torch.

Paper: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Four numbers of 32
bits per call; 7 rounds, the fewest that pass the authors' tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_ROUNDS = 7

_CPU = torch.device("cpu")
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def random_words(
    seed: int | Tensor, num_rows: int, num_columns: int, device: torch.device = _CPU
) -> Tensor:
    """A 32-bit random number for every element of a matrix.

    Element (row, column) is word `column % 4` of the counter (column // 4, row, row >> 32, 0), so
    the element does not depend on how the matrix is cut into blocks.

    Args:
        seed: of 64 bits: a number, or an int64 tensor of one element.
        num_rows: of the matrix.
        num_columns: of the matrix.
        device: of the result, and of a seed that is a tensor.

    Returns:
        int64 [num_rows, num_columns], each 0 <= value < 2**32.
    """
    rows = torch.arange(num_rows, dtype=torch.int64, device=device)[:, None]
    quads = torch.arange((num_columns + 3) // 4, dtype=torch.int64, device=device)[None, :]
    counter = [quads & _WORD, rows & _WORD, rows >> 32, torch.zeros_like(rows)]
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(NUM_ROUNDS):
        first, second, third, fourth = counter
        counter = [
            _high_word(third, _MULTIPLIERS[1]) ^ second ^ low,
            _low_word(third, _MULTIPLIERS[1]),
            _high_word(first, _MULTIPLIERS[0]) ^ fourth ^ high,
            _low_word(first, _MULTIPLIERS[0]),
        ]
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    words = torch.stack(torch.broadcast_tensors(*counter), dim=-1)
    return words.flatten(1)[:, :num_columns]


def _high_word(values: Tensor, factor: int) -> Tensor:
    """The upper 32 bits of a product of two 32-bit numbers, in steps that fit into 63 bits."""
    return (values * (factor >> 16) + ((values * (factor & 0xFFFF)) >> 16)) >> 16


def _low_word(values: Tensor, factor: int) -> Tensor:
    # Overflow wraps around, which does not change the lower bits.
    return (values * factor) & _WORD

"""A GPT with batches for it, as sections measure its steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pykern.models import gpt

from .tools import DEVICE


@dataclass(frozen=True)
class GptWork:
    """The sizes of a GPT, and of its rows."""

    blocks: int
    width: int
    context: int

    def model(self) -> nn.Sequential:
        return gpt(
            layers=self.blocks, width=self.width, heads=self.width // 64, context=self.context
        )

    def batch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same each time."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(256, (rows, self.context + 1), generator=generator).to(DEVICE)
        return ids[:, :-1], ids[:, 1:]

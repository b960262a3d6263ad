"""The training step that pipelines of all makers are timed by: the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models import gpt
from ..partition import partition

_NUM_TOKENS = 256


@dataclass(frozen=True)
class GptTask:
    """A GPT with two blocks for each device, and a batch for it.

    Attributes:
        num_devices: of a pipeline.
        num_microbatches: of a batch.
        width: of the model.
        heads: of an attention.
        context: the tokens of a row.
        rows: of a microbatch.
    """

    num_devices: int
    num_microbatches: int
    width: int
    heads: int
    context: int
    rows: int

    def model(self) -> nn.Sequential:
        """The model, with the same numbers at each call."""
        return gpt(
            vocab=_NUM_TOKENS,
            layers=2 * self.num_devices,
            width=self.width,
            heads=self.heads,
            context=self.context,
            seed=0,
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens, and the tokens behind them: [rows * num_microbatches, context] int64 each."""
        shape = (self.rows * self.num_microbatches, self.context + 1)
        ids = torch.randint(_NUM_TOKENS, shape, generator=torch.Generator().manual_seed(0))
        # torch 2.11 refuses microbatches with other strides than those of the given values.
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def stages(self, num_stages: int) -> list[nn.Module]:
        """The model, cut as `Pipeline` cuts it; parameters keep their names."""
        model = self.model()
        spans = partition(model, num_stages).stages
        return [model[span.start : span.stop] for span in spans]

    def values(self, num_stages: int) -> list[Tensor]:
        """The inputs of the stages for a microbatch, and the last one's output, without numbers."""
        tokens = (self.rows, self.context)
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        hidden = torch.empty(*tokens, self.width, device="meta", requires_grad=True)
        logits = torch.empty(*tokens, _NUM_TOKENS, device="meta", requires_grad=True)
        return [ids, *[hidden] * (num_stages - 1), logits]

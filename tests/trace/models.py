"""Models with forwards of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + (y if mask is None else y * mask)


class Network(nn.Module):
    """Glue of all kinds: a skip, a parameter and a buffer of its own, a mask that it looks at."""

    def __init__(self, width: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.position = nn.Parameter(torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("causal", torch.ones(16, 16).tril())

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.position[:length]
        skip = x
        if mask is not None and mask.all():
            mask = None
        if mask is not None:
            mask = mask[:, :, None].to(x.dtype)
        for block in self.blocks:
            x = block(x, mask=mask)
        x = self.norm(x) + skip
        assert isinstance(self.causal, Tensor)
        x = x * self.causal[length - 1, :length].view(1, -1, 1)
        return {"last": x[:, -1], "all": x, "length": length}


class Given(nn.Module):
    """An embedding and a norm around a function of the test's."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)

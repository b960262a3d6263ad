"""The loss and the gradients of a step, in a file that other processes compare theirs with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """A loss, and where the gradients are.

    Attributes:
        loss: of the step.
        file: the numbers of all gradients, float32, one gradient behind another.
        shapes: of each gradient, by name, in the order of the file.
    """

    loss: float
    file: str
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def written(cls, loss: float, gradients: Mapping[str, Tensor], file: Path) -> Answer:
        """The answer with these gradients, float32, in a new file."""
        numbers = torch.cat([gradient.flatten().cpu() for gradient in gradients.values()])
        _numbers(str(file), len(numbers), shared=True).copy_(numbers)
        shapes = {name: tuple(gradient.shape) for name, gradient in gradients.items()}
        return cls(loss, str(file), shapes)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        parts = _numbers(self.file, sum(sizes), shared=False).split(sizes)
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}


def _numbers(file: str, count: int, *, shared: bool) -> Tensor:
    """The numbers of a file, float32 [count]; writes to a shared one change the file."""
    return torch.from_file(file, shared=shared, size=count, dtype=torch.float32)

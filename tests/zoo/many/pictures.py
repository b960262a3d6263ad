"""The inputs of vision models."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case

from .loss import mean_of_squares

# Gives a model with its data.
Make = Callable[[], Case]

ROWS = 4


def pictures(make: Callable[..., nn.Module], *size: int, **options: Any) -> Case:
    """A case of pictures, or of clips with `size` of frames, height and width."""
    model = make(**options).train()
    return Case(model, (torch.randn(ROWS, 3, *size),), mean_of_squares, rows=ROWS)


@cache
def define_operators() -> object:
    """Lets torchvision be imported where its compiled operators are not for this torch.

    Its wheels on the index are for CUDA. No model here calls these operators.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library

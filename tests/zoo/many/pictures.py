"""What models of vision are fed."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Case

from .loss import mean_of_squares

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
    library = torch.library.Library("torchvision", "FRAGMENT")  # noqa: TOR901 - kept by the cache
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def have(name: str) -> bool:
    """Whether the package can be imported."""
    define_operators()
    try:
        __import__(name)
    except ImportError:
        return False
    return True


Cases = Mapping[str, Callable[[], Case]]

"""A loss for whatever a model returns."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def mean_of_squares(output: Any) -> Tensor:
    """The mean of the squares of each tensor that trains, added up: of a whole tree."""
    leaves = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    # A dict or a list may hold a tensor twice.
    distinct = {id(leaf): leaf for leaf in leaves}.values()
    terms = [leaf.abs().float().square().mean() for leaf in distinct]
    return sum(terms[1:], terms[0]) if terms else torch.zeros(())

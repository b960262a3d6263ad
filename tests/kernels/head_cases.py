"""Heads of models, exact results for them, and a look at what is allocated."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.kernels import linear_cross_entropy as op

IGNORED = -100
VOCABULARY = 301


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Chunks of two rows, and the gradient of a weight in blocks of 128 rows."""
    patch.setattr(op, "_FEWEST_ROWS", 2)
    patch.setattr(op, "_MOST_ROWS", 2)
    patch.setattr(op, "_BLOCK", 1)


def exactly(x: Tensor, w: Tensor, target: Tensor, reduction: str = "mean") -> list[Tensor]:
    """Loss and gradients in float64."""
    x, w = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    loss = F.cross_entropy(x @ w.T, target, reduction=reduction, ignore_index=IGNORED)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w))]


def case(num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(num_rows)
    x = torch.randn(num_rows, 24).to(dtype).requires_grad_()
    w = torch.randn(VOCABULARY, 24).to(dtype).requires_grad_()
    target = torch.randint(VOCABULARY, (num_rows,))
    target[1::4] = IGNORED
    return x, w, target


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, beside memory that is known."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    size = storage.nbytes() // tensor.itemsize
                    self.num_elements = max(self.num_elements, size)
        return result

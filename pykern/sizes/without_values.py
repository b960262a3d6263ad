"""Copies of models and batches that have shapes and no values.

torch's fake tensors have the sizes, dtypes and device of real tensors, and no memory. Parameters
and inputs of floating point become fake. Token ids, masks and buffers keep their values, since
forwards branch on these. Parameters of other classes, such as quantised ones, are copied with their
values, since fake tensors do not have these classes. A result is fake if an operand is fake.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..notes import add_note
from ..tensors.parameters import keep_gradient_dtype
from ..tensors.sparse import dense_parts
from ..tensors.trees import map_tensors

# Losses whose mean or sum has the memory of all terms; torch's fake result has that of a number.
_IN_TERMS = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}
# Results of these have fewer entries than they have with values, if all operands are sparse.
_OF_ENTRIES = {torch.ops.aten.clone.default, torch.ops.aten.add_.Tensor}
_NOTE = "raised while the model ran without values, to count bytes"


class _WithTerms(FakeTensorMode):
    """A mode of fake tensors, in which such a loss has the memory that it has with values.

    Sparse gradients have all entries of their sums, too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_ENTRIES and all(_is_sparse(one) for one in args):
            with self:
                return _with_entries(*args)
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _IN_TERMS and result.dim() == 0:
            terms = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return result.new_empty(terms).as_strided((), ())
        return result


class WithoutValues:
    """Makes such copies. A model and its batch must come from the same object.

    Args:
        remedy: a sentence behind the note of errors.
    """

    def __init__(self, remedy: str = "") -> None:
        self._note = f"{_NOTE}. {remedy}" if remedy else _NOTE
        self._mode = _WithTerms(allow_non_fake_inputs=True)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context in which errors get a note; torch neither logs them nor warns of addresses.

        The caller's autocast for GPUs is one for the CPU, as which the model runs.
        """
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled, logger.disabled = logger.disabled, True
        try:
            with warnings.catch_warnings(), as_on_gpus():
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                yield
        except BaseException as error:
            add_note(error, self._note)
            raise
        finally:
            logger.disabled = was_disabled

    def model(self, model: Any) -> Any:
        """A copy of a model, or of a list of layers, on the CPU; the model may be on "meta"."""
        layers = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        # `deepcopy` takes these in the place of the tensors, and copies all others.
        twins: dict[int, Tensor] = {id(buffer): _real(buffer) for buffer in layers.buffers()}
        for one in layers.parameters():
            if type(one) is nn.Parameter:
                twin = nn.Parameter(self._like(one).detach(), one.requires_grad)
                keep_gradient_dtype(twin, one)
                twins[id(one)] = twin
        return copy.deepcopy(model, twins)

    def batch(self, tree: Any) -> Any:
        """The same tree of tensors, on the CPU."""
        return map_tensors(self._like, tree)

    def trained(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that an optimizer may write to: these, which have no values."""
        return list(parameters)

    def _like(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return _real(tensor)
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return fake.requires_grad_(tensor.requires_grad)


def as_on_gpus() -> AbstractContextManager[object]:
    """The caller's autocast for GPUs, as one for the CPU."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda"))


def _real(tensor: Tensor) -> Tensor:
    """A copy with its values, or with zeros where it has none."""
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().to("cpu", copy=True)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _with_entries(first: Tensor, *added: Tensor) -> Tensor:
    """The first sparse tensor with the entries of the others; a copy of it without others."""
    indices, values = zip(*map(dense_parts, (first, *added)), strict=True)
    # In any other way, torch 2.11 asks whether to look at invariants, and warns of that.
    made: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        first.sparse_dim(),
        first.dense_dim(),
        first.shape,
        torch.cat(indices, 1),
        torch.cat(values),
        dtype=first.dtype,
        layout=first.layout,
        device=first.device,
    )
    if not added:
        return made
    first.data = made
    return first

"""Parameters of any class, such as those of quantised models: copies of them, and their bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..torch_private import is_traceable_wrapper_subclass
from .sparse import dense_parts

_T = TypeVar("_T", bound=Tensor)

# The depth of nested scales of a quantised parameter: scales may have scales of their own.
_DEPTH = 3


def with_values(original: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter with the class and attributes of the original, and a gradient of its own.

    Args:
        original: the original parameter.
        values: the values of the new parameter, which shares their memory.

    Raises:
        ValueError: the new parameter would train outside of inference mode, which made its values.
    """
    made: Any
    if original.requires_grad and values.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "parameters that train must be made outside of torch.inference_mode, got one of shape "
            f"{tuple(original.shape)} made within. Make the model outside, or freeze it"
        )
    if _has_class(original):
        made = torch.Tensor._make_subclass(type(original), values, original.requires_grad)
    else:
        made = nn.Parameter(values, original.requires_grad)
    for name, value in vars(original).items():
        vars(made).setdefault(name, value)
    keep_gradient_dtype(made, original)
    return made  # type: ignore[no-any-return]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's `.grad`, which the user may have set apart from its own."""
    # Later versions of torch have `grad_dtype`, leaves alone do; None stands for any dtype.
    chosen = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return chosen or parameter.dtype


def keep_gradient_dtype(made: nn.Parameter, original: nn.Parameter) -> None:
    """Has a new parameter's gradients be of the dtype of the original's."""
    if (dtype := gradient_dtype(original)) != original.dtype:
        made.grad_dtype = dtype


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """The bytes of the gradients of parameters that train."""
    return sum(num_bytes(p) // p.element_size() * gradient_dtype(p).itemsize for p in parameters)


def on_device(original: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    """The parameter from which a copy on a device is made; its class moves it if necessary.

    Args:
        original: a parameter.
        device: the device; None for that of the parameter.
    """
    if device is None or original.device == device or not _has_class(original):
        return original
    # `to` of the class may move tensors that the original still needs.
    moved: Any = copy.deepcopy(original).to(device)
    return moved if isinstance(moved, type(original)) else original


def num_values(parameter: Tensor) -> int:
    """The number of values of a parameter, also if several values are packed into a byte."""
    state = getattr(parameter, "quant_state", None)
    shape = getattr(state, "shape", None)
    return parameter.numel() if shape is None else math.prod(shape)


def num_bytes(parameter: Tensor) -> int:
    """The bytes of a parameter and of the tensors needed to read it, such as scales."""
    parts = {part.untyped_storage()._cdata: part.nbytes for part in _parts(parameter)}
    return sum(parts.values())


def distinct(tensors: Iterable[_T]) -> list[_T]:
    """Each once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def held_by(
    layers: Iterable[nn.Module],
) -> tuple[list[nn.Parameter], list[Tensor], list[nn.Parameter]]:
    """The parameters of layers, their buffers, and the parameters that train, each once."""
    every = list(layers)
    parameters = distinct(parameter for layer in every for parameter in layer.parameters())
    buffers = distinct(buffer for layer in every for buffer in layer.buffers())
    return parameters, buffers, [parameter for parameter in parameters if parameter.requires_grad]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of parameters, as `num_bytes` counts them."""
    return sum(map(num_bytes, tensors))


def _has_class(parameter: nn.Parameter) -> bool:
    """Whether the class is a proper subclass of nn.Parameter; a marked tensor does not count."""
    return type(parameter) is not nn.Parameter and nn.Parameter in type(parameter).__mro__


def _parts(thing: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    if isinstance(thing, Tensor) and is_traceable_wrapper_subclass(thing):
        for name in thing.__tensor_flatten__()[0]:
            yield from _parts(getattr(thing, name))
        return
    if isinstance(thing, Tensor):
        yield from dense_parts(thing)
    if depth > 0 and not isinstance(thing, nn.Module | type):
        for part in getattr(thing, "__dict__", {}).values():
            yield from _parts(part, depth - 1)

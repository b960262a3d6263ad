"""The bytes that parameters of a device take, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..tensors.parameters import bytes_of, distinct, gradient_dtype


def state_bytes(
    make: Callable[[list[nn.Parameter]], Optimizer], parameters: Sequence[nn.Parameter]
) -> int:
    """The bytes of the state that an optimizer keeps for these parameters, found by a step of it.

    Raises:
        TypeError: it returns something else.
        ValueError: its step reads values, which are missing, or calls the model.
    """
    if not parameters:
        return 0
    optimizer = make(list(parameters))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must return a torch.optim.Optimizer, got a "
            f"{type(optimizer).__name__}. Give its class, or lambda params: its_class(params, lr=1)"
        )
    for group in optimizer.param_groups:
        # The state is as large without, and refused where parameters are on no GPU.
        group.update({"capturable": False} if "capturable" in group else {})
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    try:
        optimizer.step()
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "optimizer must step without values and without a closure, got "
            f"{type(optimizer).__name__}: {error}. Leave it out, and add its state yourself"
        ) from error
    finally:
        for parameter in parameters:
            parameter.grad = None
    kept = (value for state in optimizer.state.values() for value in state.values())
    return bytes_of(distinct(value for value in kept if isinstance(value, Tensor)))

"""Frozen linear layers of few bits, with the interfaces of the libraries that make them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in 8 bits, and a scale for each row."""
    scale = weight.detach().abs().amax(1, keepdim=True) / 127
    return (weight.detach() / scale).round().to(torch.int8), scale


class Packed(nn.Linear):
    """The weight is a parameter of whole numbers, the scales are a buffer."""

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        codes, scale = codes_of(linear.weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale)


class Codes(Tensor):
    """As the tensors of torchao: says that it is of floats, and holds whole numbers and scales."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        kwargs: dict[str, Any] = {"dtype": scale.dtype, "device": codes.device}
        return Tensor._make_wrapper_subclass(cls, codes.shape, **kwargs)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Codes:
        return Codes(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        one = args[0]
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return Codes(func(one.codes, **kwargs), func(one.scale, **kwargs))
        plain = [each.codes * each.scale if isinstance(each, Codes) else each for each in args]
        return func(*plain, **kwargs)


def of_codes(linear: nn.Linear) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, bias=False)
    made.weight = nn.Parameter(Codes(*codes_of(linear.weight)), requires_grad=False)
    return made


class State:
    """The state that bitsandbytes keeps beside a weight."""

    def __init__(self, scale: Tensor, shape: torch.Size) -> None:
        self.scale, self.shape = scale, shape


class Nibbles(nn.Parameter):
    """As bitsandbytes' Params4bit: two weights in a byte, and a state in an attribute."""

    quant_state: State

    def __new__(cls, codes: Tensor, state: State) -> Any:
        made = Tensor._make_subclass(cls, codes, False)
        made.quant_state = state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Nibbles:
        if id(self) not in memo:
            memo[id(self)] = Nibbles(self.data.clone(), copy.deepcopy(self.quant_state, memo))
        return memo[id(self)]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves the state of this one too, as the library does."""
        self.quant_state.scale = self.quant_state.scale.to(*args, **kwargs)
        return Nibbles(super().to(*args, **kwargs).detach(), self.quant_state)


class FourBits(nn.Linear):
    """As bitsandbytes' Linear4bit: cannot compute without the state of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = ((weight / scale).round() + 8).to(torch.uint8).reshape(-1, 2)
        packed = codes[:, :1] * 16 + codes[:, 1:]
        self.weight: Any = Nibbles(packed, State(scale, weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        state, packed = self.weight.quant_state, self.weight.data
        codes = torch.cat((packed // 16, packed % 16), 1).reshape(state.shape)
        return F.linear(x, (codes.float() - 8) * state.scale)


class EightBits(nn.Linear):
    """As bitsandbytes' Linear8bitLt: the first call takes the numbers from the parameter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        codes, scale = codes_of(linear.weight)
        self.weight: Any = Nibbles(codes, State(scale, codes.shape))
        self.state = State(torch.empty(0), codes.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.quant_state is not None:
            self.state, self.weight.quant_state = self.weight.quant_state, None
        return F.linear(x, self.weight.data * self.state.scale)


KINDS: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "whole numbers": Packed,
    "a tensor subclass": of_codes,
    "a parameter with a state": FourBits,
    "a state that moves": EightBits,
}


def quantise(model: nn.Module, kind: str) -> None:
    """Replaces the linear layers in a model, which have no bias."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, KINDS[kind](child))

"""Copies of layers, with gradients of their own.

A copy of a layer is a module of the same type with the same attributes, hooks and modes. On the
device of the original, a copy has the same buffers, and new parameters with the same storage; on
another device the storage is a copy. So copied parameters have the originals' values and their own
`.grad`. Copies are made for each step, because changes of an original cannot be detected: torch's
fused optimizers and writes through `.data` do not change version counters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from ...tensors.parameters import on_device, with_values
from ...trace.state import TORCHS

# Parameters of the original, each with its copy.
Pairs = list[tuple[nn.Parameter, nn.Parameter]]

# Functions that are set on the object itself run with the original's parameters.
_BOUND = ("forward", "_compiled_call_impl")


def copy_layers(
    layers: Sequence[nn.Module],
    device: torch.device | None,
    only: Collection[Tensor] | None = None,
    *,
    counted_apart: bool = False,
) -> tuple[list[nn.Module], Pairs]:
    """Copies of the layers, and the pairs of a parameter and its copy.

    Args:
        layers: the originals.
        device: of the copies; None for the device of each original tensor.
        only: the parameters and buffers to copy; None for all. Other tensors, and modules without
            any tensor to copy, stay the originals.
        counted_apart: whether originals and copies have separate version counters. If so, an
            original that was moved to another storage may be written while the graph of a copy
            lives.
    """
    copies = _Copies(device, only, counted_apart=counted_apart)
    return [copies.of(layer) for layer in layers], list(copies.parameters.items())


class _Copies:
    """Copies of modules and parameters. An object that occurs several times has one copy."""

    def __init__(
        self,
        device: torch.device | None,
        only: Collection[Tensor] | None,
        *,
        counted_apart: bool = False,
    ) -> None:
        self.parameters: dict[nn.Parameter, nn.Parameter] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._buffers: dict[Tensor, Tensor] = {}
        self._device = device
        self._only = only
        self._counted_apart = counted_apart

    def of(self, module: nn.Module) -> nn.Module:
        if module not in self._modules:
            tensors = chain(module.parameters(), module.buffers())
            copied = self._only is None or any(tensor in self._only for tensor in tensors)
            self._modules[module] = self._copy(module) if copied else module
        return self._modules[module]

    def _copy(self, module: nn.Module) -> nn.Module:
        copy: Any = module._replicate_for_data_parallel()
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy.register_parameter(name, None)
            else:
                # `setattr`, because recurrent layers also keep their parameters in a list.
                setattr(copy, name, self._parameter(parameter))
        for name, buffer in module._buffers.items():
            copy._buffers[name] = None if buffer is None else self._buffer(buffer)
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else self.of(child)
        return copy  # type: ignore[no-any-return]

    def _parameter(self, original: nn.Parameter) -> nn.Parameter:
        if self._only is not None and original not in self._only:
            return original
        if original not in self.parameters:
            source = on_device(original, self._device)
            values = source.data if self._counted_apart else source.detach()
            copy = with_values(source, values.to(self._device))
            main = getattr(original, "main_grad", None)
            if main is not None:
                copy.main_grad = torch.zeros_like(main, device=self._device)  # type: ignore[attr-defined]
            self.parameters[original] = copy
        return self.parameters[original]

    def _buffer(self, original: Tensor) -> Tensor:
        if self._only is not None and original not in self._only:
            return original
        if original not in self._buffers:
            self._buffers[original] = original.to(self._device)
        return self._buffers[original]


def add_gradients(pairs: Pairs) -> None:
    """Adds the gradients of copies to the `.grad` of the originals.

    The copies keep their gradients, because a GPU may still be reading them.
    """
    used = [
        (original, copy.grad.to(original.device))
        for original, copy in pairs
        if copy.grad is not None
    ]
    if used:
        originals, gradients = zip(*used, strict=True)
        # A backward adds gradients with the hooks of the parameters.
        torch.autograd.backward(originals, gradients)
    for original, copy in pairs:
        main = getattr(original, "main_grad", None)
        if main is not None:
            main.add_(copy.main_grad.to(main.device))  # type: ignore[attr-defined]


def move_gradients(pairs: Pairs) -> None:
    """Moves the gradients of copies to the originals, replacing the originals' gradients.

    Hooks of a parameter are called, as in a backward.
    """
    for original, copy in pairs:
        gradient, copy.grad, original.grad = copy.grad, None, None
        if gradient is None:
            continue
        if original._backward_hooks or original._post_accumulate_grad_hooks:
            torch.autograd.backward(original, gradient)
        else:
            original.grad = gradient


def refuse_to_copy(
    layers: Mapping[str, nn.Module],
    only: Collection[Tensor] | None,
    consequence: str,
    *,
    in_order: bool = False,
) -> None:
    """Raises ValueError if copies of the layers could not replace the originals.

    Args:
        layers: the originals by name.
        only: the tensors to copy, see `copy_layers`.
        consequence: ends the message.
        in_order: whether the forwards of copies run in a fixed order.

    Raises:
        ValueError: a layer has buffers that forwards of copies would write in no fixed order, or it
            keeps parameters or modules where a copy would still find the originals.
    """
    for layer_name, layer in layers.items():
        _refuse_compiled(layer_name, layer, only, consequence)
        (copy,), _ = copy_layers([layer], None, only)
        copies = dict(zip(layer.modules(), copy.modules(), strict=True))
        for name, module in layer.named_modules(prefix=layer_name):
            if copies[module] is module:
                continue
            reason = None if in_order else _writes(module)
            reason = reason or _cannot_copy(module, copies[module])
            if reason is not None:
                raise ValueError(f"{name} ({type(module).__name__}) {reason}: {consequence}")


def _refuse_compiled(
    layer_name: str, layer: nn.Module, only: Collection[Tensor] | None, consequence: str
) -> None:
    """Raises ValueError for a module that `torch.compile` has returned.

    Such a module passes attributes on to the module inside, so a copy would change the original.
    """
    for name, module in layer.named_modules(prefix=layer_name):
        tensors = chain(module.parameters(), module.buffers())
        if "_orig_mod" in module._modules and (only is None or any(t in only for t in tensors)):
            raise ValueError(
                f"{name} must not be the result of torch.compile, which runs with the original's "
                f"parameters, got one: {consequence}. Compile it in place (layer.compile())"
            )


def _writes(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
        return "has running statistics, which copies would update in no fixed order"
    if isinstance(module, _SpectralNorm):
        return "has vectors that forwards improve, which copies would do in no fixed order"
    return None


def _cannot_copy(module: nn.Module, copy: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled together with its parameters"
    bound = [name for name in _BOUND if vars(module).get(name) is not None]
    if bound:
        return f"has a {bound[0]} of its own, which may run with the original's parameters"
    mine = set(copy.parameters())
    for name, value in vars(copy).items():
        if name not in TORCHS and any(trains(part, mine) for part in parts_of(value)):
            return f"keeps what it trains in .{name} too, where a copy finds the original's"
    return None


def parts_of(value: object) -> Iterable[object]:
    """The entries of a container that is an attribute; any other value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else (value,)


def trains(value: object, mine: set[nn.Parameter]) -> bool:
    """Whether the value is, or has, a parameter that requires grad and is not in `mine`."""
    owner = getattr(value, "__self__", value)
    found = [owner] if isinstance(owner, nn.Parameter) else []
    if isinstance(owner, nn.Module):
        found = list(owner.parameters())
    return any(parameter.requires_grad and parameter not in mine for parameter in found)

"""Further replicas of a stage, whose layers share what they can with those of the first.

A copy of a layer is a module of the same type with the same attributes, hooks and modes. On the
device of the original its buffers are the same and its parameters others with the same storage; on
another device the storage is a copy. So their values are the originals', their `.grad` is their
own. Copies are made for each step, so that nothing done to an original is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .random import StepSeed
from .recompute import Level
from .stage import Finish, Stage

# Parameters of the original, each with its copy.
Pairs = list[tuple[nn.Parameter, nn.Parameter]]

# Set on the object, these run with the original's parameters whoever calls them.
_BOUND = ("forward", "_compiled_call_impl")
# What every module has: parameters, buffers, modules, hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def copy_layers(
    layers: Sequence[nn.Module], device: torch.device | None
) -> tuple[list[nn.Module], Pairs]:
    """Copies of the layers, and each of their parameters with its copy.

    Args:
        layers: the originals.
        device: where the copies live; None for where each tensor of the originals is.
    """
    copies = _Copies(device)
    return [copies.of(layer) for layer in layers], list(copies.parameters.items())


class _Copies:
    """Copies of modules and parameters, one of each however often it occurs."""

    def __init__(self, device: torch.device | None) -> None:
        self.parameters: dict[nn.Parameter, nn.Parameter] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._buffers: dict[Tensor, Tensor] = {}
        self._device = device

    def of(self, module: nn.Module) -> nn.Module:
        if module in self._modules:
            return self._modules[module]
        copy: Any = module._replicate_for_data_parallel()
        self._modules[module] = copy
        for name, parameter in module._parameters.items():
            if parameter is None:
                copy.register_parameter(name, None)
            else:
                # As an attribute, because recurrent layers note their parameters elsewhere too.
                setattr(copy, name, self._parameter(parameter))
        for name, buffer in module._buffers.items():
            copy._buffers[name] = None if buffer is None else self._buffer(buffer)
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else self.of(child)
        return copy  # type: ignore[no-any-return]

    def _parameter(self, original: nn.Parameter) -> nn.Parameter:
        if original not in self.parameters:
            values = original.detach().to(self._device)
            copy = nn.Parameter(values, original.requires_grad)
            main = getattr(original, "main_grad", None)
            if main is not None:
                copy.main_grad = torch.zeros_like(main, device=self._device)  # type: ignore[attr-defined]
            self.parameters[original] = copy
        return self.parameters[original]

    def _buffer(self, original: Tensor) -> Tensor:
        if original not in self._buffers:
            self._buffers[original] = original.to(self._device)
        return self._buffers[original]


class Replica(Stage):
    """The same stage once more, for other microbatches, on the same device or another."""

    def __init__(self, original: Stage, device: torch.device) -> None:
        super().__init__(original.index, original.layers, device)
        self._originals = original.layers
        self._pairs: Pairs = []
        original.reductions.append(self._add_gradients)

    def begin(
        self,
        num_microbatches: int,
        seed: StepSeed,
        finish: Finish,
        levels: Sequence[Level | None] = (),
    ) -> None:
        """Makes room for a step, and copies of the original's layers."""
        super().begin(num_microbatches, seed, finish, levels)
        self.layers, self._pairs = copy_layers(self._originals, self.device)

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""
        super().end()
        self.layers, self._pairs = self._originals, []

    def _add_gradients(self) -> None:
        # The copies keep their gradients until the step ends: a GPU may still be reading them.
        used = [
            (original, copy.grad.to(original.device))
            for original, copy in self._pairs
            if copy.grad is not None
        ]
        if used:
            originals, gradients = zip(*used, strict=True)
            # As a backward does it, with the hooks of the parameters.
            torch.autograd.backward(originals, gradients)
        for original, copy in self._pairs:
            main = getattr(original, "main_grad", None)
            if main is not None:
                main.add_(copy.main_grad.to(main.device))  # type: ignore[attr-defined]


def refuse_to_copy(layers: Mapping[str, nn.Module]) -> None:
    """Raises where copies of the layers could not take the place of the originals.

    Raises:
        ValueError: a layer has running statistics, which replicas would write in no fixed order, or
            keeps parameters or modules where a copy would still find the originals.
    """
    for layer_name, layer in layers.items():
        (copy,), _ = copy_layers([layer], None)
        copies = dict(zip(layer.modules(), copy.modules(), strict=True))
        for name, module in layer.named_modules(prefix=layer_name):
            reason = _cannot_copy(module, copies[module])
            if reason is not None:
                raise ValueError(
                    f"{name} ({type(module).__name__}) {reason}: a plan with several replicas "
                    "cannot run it"
                )


def refuse_trained_loss(loss_fn: object) -> None:
    """Raises ValueError where the loss function trains: all replicas add to its `.grad`."""
    if _trains(loss_fn, set()):
        raise ValueError(
            "loss_fn has parameters that train, to which replicas would add in no fixed order: a "
            "plan with several replicas cannot run it; give them to the last layer"
        )


def _cannot_copy(module: nn.Module, copy: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
        return "has running statistics, which replicas would update in no fixed order"
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled together with its parameters"
    bound = [name for name in _BOUND if vars(module).get(name) is not None]
    if bound:
        return f"has a {bound[0]} of its own, which may run with the original's parameters"
    mine = set(copy.parameters())
    for name, value in vars(copy).items():
        if name not in _OF_MODULES and any(_trains(part, mine) for part in _parts(value)):
            return f"keeps what it trains in .{name} too, where a copy finds the original's"
    return None


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else (value,)


def _trains(value: object, mine: set[nn.Parameter]) -> bool:
    """Whether the value is, or belongs to, something that trains and is not the copy's."""
    owner = getattr(value, "__self__", value)
    found = [owner] if isinstance(owner, nn.Parameter) else []
    if isinstance(owner, nn.Module):
        found = list(owner.parameters())
    return any(parameter.requires_grad and parameter not in mine for parameter in found)

"""Further replicas of a stage, whose layers share all storage with those of the first.

A copy of a layer is a module of the same type with the same attributes, hooks, buffers and modes.
Its parameters are others with the same storage: their values are always the originals', their
`.grad` is their own. Copies are made for each step, so that nothing done to an original is missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .random import StepSeed
from .stage import Finish, Stage

# Parameters of the original, each with its copy.
Pairs = list[tuple[nn.Parameter, nn.Parameter]]

# Set on the object, these run with the original's parameters whoever calls them.
_BOUND = ("forward", "_compiled_call_impl")
# What every module has: parameters, buffers, modules, hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def copy_layers(layers: Sequence[nn.Module]) -> tuple[list[nn.Module], Pairs]:
    """Copies of the layers, and each of their parameters with its copy."""
    copies: dict[nn.Module, nn.Module] = {}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    result = [_copy(layer, copies, parameters) for layer in layers]
    return result, list(parameters.items())


def _copy(
    module: nn.Module,
    copies: dict[nn.Module, nn.Module],
    parameters: dict[nn.Parameter, nn.Parameter],
) -> nn.Module:
    if module in copies:
        return copies[module]
    copy: Any = module._replicate_for_data_parallel()
    copies[module] = copy
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in parameters:
            shared = nn.Parameter(parameter.detach(), parameter.requires_grad)
            parameters[parameter] = shared
        if parameter is None:
            copy.register_parameter(name, None)
        else:
            # As an attribute, because recurrent layers note their parameters elsewhere too.
            setattr(copy, name, parameters[parameter])
    for name, child in module._modules.items():
        copy._modules[name] = None if child is None else _copy(child, copies, parameters)
    return copy  # type: ignore[no-any-return]


class Replica(Stage):
    """The same stage once more, for other microbatches."""

    def __init__(self, original: Stage) -> None:
        super().__init__(original.index, original.layers)
        self._originals = original.layers
        self._pairs: Pairs = []
        original.reductions.append(self._add_gradients)

    def begin(self, num_microbatches: int, seed: StepSeed, finish: Finish) -> None:
        """Makes room for a step, and copies of the original's layers."""
        super().begin(num_microbatches, seed, finish)
        self.layers, self._pairs = copy_layers(self._originals)

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""
        super().end()
        self.layers, self._pairs = self._originals, []

    def _add_gradients(self) -> None:
        pairs, self._pairs = self._pairs, []
        used = [(original, copy.grad) for original, copy in pairs if copy.grad is not None]
        if used:
            originals, gradients = zip(*used, strict=True)
            # As a backward does it, with the hooks of the parameters.
            torch.autograd.backward(originals, gradients)


def refuse_to_copy(layers: Mapping[str, nn.Module]) -> None:
    """Raises where copies of the layers could not take the place of the originals.

    Raises:
        ValueError: a layer has running statistics, which replicas would write in no fixed order, or
            keeps parameters or modules where a copy would still find the originals.
    """
    for layer_name, layer in layers.items():
        copies = dict(zip(layer.modules(), _copy(layer, {}, {}).modules(), strict=True))
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

"""What a run of a model changes beside gradients, to be put back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..trace.untouched import kept_of, put_back


class Snapshot:
    """Buffers, other attributes of modules, a batch, and random numbers, as they are now.

    Parameters are not copied: a forward and a backward leave their values alone.

    Args:
        modules: of the model and of the loss function.
        batch: the tensors of a batch, into which a first layer that works in place writes.
        generators: of torch's, those that actions draw from.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch: Iterable[Tensor],
        generators: Iterable[torch.Generator],
    ) -> None:
        self._modules = [(module, kept_of(module)) for module in modules]
        buffers = [held for module in modules for held in module._buffers.values()]
        found = [*(held for held in buffers if held is not None), *batch]
        unique = {id(tensor): tensor for tensor in found}.values()
        self._values = [(tensor, tensor.detach().clone()) for tensor in unique]
        drawn = {*generators, *held_generators(modules)}
        self._generators = [(one, one.get_state()) for one in drawn]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Puts all of it back."""
        for module, kept in self._modules:
            put_back(module, kept)
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for generator, state in self._generators:
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Gradients:
    """What parameters have collected, put aside.

    Within it each has a copy to add to, or nothing. Behind it all have what they had, the same
    tensors.

    Args:
        parameters: whose.
        keep: whether they begin with copies of what they have.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, keep: bool) -> None:
        self._parameters = parameters
        self._keep = keep

    def __enter__(self) -> None:
        self._aside = [
            (one, name, held)
            for one in self._parameters
            for name, held in (("grad", one.grad), ("main_grad", getattr(one, "main_grad", None)))
            if name == "grad" or held is not None
        ]
        for one, name, held in self._aside:
            begins = None if held is None else held.detach().clone()
            if begins is not None and not self._keep:
                begins = None if name == "grad" else begins.zero_()
            setattr(one, name, begins)

    def __exit__(self, *_: object) -> None:
        for one, name, held in self._aside:
            setattr(one, name, held)


def gradients_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """What parameters have collected, by name."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in named:
        found[name] = parameter.grad
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            found[f"{name}.main_grad"] = main
    return found


def held_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Those that modules keep as attributes."""
    held = [value for module in modules for value in vars(module).values()]
    return [value for value in held if isinstance(value, torch.Generator)]

"""The state that a run of a model changes, saved and restored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..trace.contents import HeldContents, holders_of, parameters_in
from ..trace.sources import everyones


class Snapshot:
    """Parameters, buffers, attributes of both, a batch, and random numbers, as they are now.

    Args:
        modules: of the model and of the loss function.
        batch: the tensors of a batch, into which a first layer that works in place writes.
        generators: the torch generators that actions draw from.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch: Iterable[Tensor],
        generators: Iterable[torch.Generator],
    ) -> None:
        buffers = [held for module in modules for held in module._buffers.values()]
        tensors = [*(held for held in buffers if held is not None), *batch]
        self._contents = HeldContents(holders_of(modules), tensors, parameters_in(modules))
        drawn = {*generators, *held_generators(modules)}
        self._generators = [(one, one.get_state()) for one in drawn]
        self._others = [(source, source.get()) for source in everyones()]

    def restore(self) -> None:
        """Restores the state; may be called again after an interrupt."""
        self._contents.put_back()
        for generator, state in self._generators:
            generator.set_state(state)
        for source, state in self._others:
            source.set(state)


class Gradients:
    """The collected gradients of parameters, put aside during a run."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._aside: list[tuple[Tensor, str, Tensor | None]] = [
            (one, name, held)
            for one in parameters
            for name, held in (("grad", one.grad), ("main_grad", getattr(one, "main_grad", None)))
            if name == "grad" or held is not None
        ]

    def begin(self, *, keep: bool) -> None:
        """Gives each parameter a copy of its gradient to add to, or no gradient."""
        for one, name, held in self._aside:
            begins = None if held is None else held.detach().clone()
            if begins is not None and not keep:
                begins = None if name == "grad" else begins.zero_()
            setattr(one, name, begins)

    def put_aside(self, leaves: Iterable[Tensor]) -> None:
        """Takes the gradients of other leaves as well, such as a tensor that the loss names."""
        known = {id(one) for one, _, _ in self._aside}
        for leaf in {id(leaf): leaf for leaf in leaves if id(leaf) not in known}.values():
            self._aside.append((leaf, "grad", leaf.grad))
            leaf.grad = None

    def restore(self) -> None:
        """Restores the same gradient tensors; may be called again after an interrupt."""
        for one, name, held in self._aside:
            setattr(one, name, held)


def gradients_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor | None]:
    """The gradients that parameters have collected, by name."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in named:
        found[name] = parameter.grad
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            found[f"{name}.main_grad"] = main
    return found


def held_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """The generators that modules keep as attributes."""
    held = [value for module in modules for value in vars(module).values()]
    return [value for value in held if isinstance(value, torch.Generator)]

"""The gradients of parameters, put aside during a run of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn


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

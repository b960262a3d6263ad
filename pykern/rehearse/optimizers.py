"""The optimizers that a script makes, for the size of their state before they have any."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..attributes import replaced

MakeLike = Callable[[list[nn.Parameter]], Optimizer]
# Kernels of one call for many tensors keep the same state, but do not run without values.
_OF_MANY = ("fused", "foreach", "capturable")


class MadeOptimizers:
    """Remembers the optimizers that are made within `watched`."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Optimizer]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it optimizers are remembered."""
        make: Any = Optimizer.__init__

        def remember(optimizer: Optimizer, *args: Any, **named: Any) -> None:
            self._made.append(weakref.ref(optimizer))
            make(optimizer, *args, **named)

        with replaced(Optimizer, "__init__", remember):
            yield

    def of(self, model: nn.Module) -> Optimizer | None:
        """The last optimizer of a parameter of the model; None without any."""
        its = {id(parameter) for parameter in model.parameters()}
        for made in reversed(self._made):
            optimizer = made()
            groups = [] if optimizer is None else optimizer.param_groups
            if any(id(one) in its for group in groups for one in group["params"]):
                return optimizer
        return None


def like(optimizer: Optimizer) -> MakeLike:
    """A function that makes such an optimizer, without state, of other parameters."""
    settings = optimizer.param_groups[0]
    plain = settings | {name: False for name in _OF_MANY if name in settings}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = [plain | {"params": parameters}]
        return twin

    return make

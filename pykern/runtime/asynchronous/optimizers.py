"""One optimizer for all stages, which each stage steps for its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def make_optimizer(make: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that a user's function makes for the parameters of all stages.

    Raises:
        TypeError: `make` is not callable, or does not return an optimizer.
        ValueError: the optimizer cannot be stepped stage by stage.
    """
    if not callable(make):
        raise TypeError(
            f"optimizer must be a function of a list of parameters, got a {type(make).__name__}. "
            "For example optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    known = list(parameters)
    optimizer = make(known)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must return a torch.optim.Optimizer, got a {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must step parameters one by one, got LBFGS, which calls the model again "
            "for each step. Use another optimizer"
        )
    refuse_foreign(optimizer, {id(parameter) for parameter in known})
    return optimizer


def refuse_foreign(optimizer: Optimizer, known: Set[int]) -> None:
    """Raises ValueError if the optimizer has a parameter that no stage would step.

    Args:
        optimizer: of all stages.
        known: the ids of all stages' parameters.
    """
    for number, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in known for parameter in group["params"]):
            raise ValueError(
                "optimizer must have parameters of the model alone, got another in group "
                f"{number}. Remove it there, or make the pipeline of a model that has it"
            )


class StageOptimizer:
    """Steps an optimizer for the parameters of one stage.

    Each stage has a twin of the optimizer with the same state and settings but its own parameter
    groups, so that stages may step at the same time.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._ids = {id(parameter) for parameter in parameters}
        self._twin: Any = object.__new__(type(optimizer))
        vars(self._twin).update(vars(optimizer))
        # A learning-rate scheduler replaces `step` by a counting one, which would step all stages.
        vars(self._twin).pop("step", None)
        self._groups: Sequence[tuple[dict[str, Any], dict[str, Any]]] = ()

    def begin(self) -> None:
        """Takes the current state and settings of the optimizer."""
        self._groups = [
            (group, {**group, "params": mine})
            for group in self._optimizer.param_groups
            if (mine := [each for each in group["params"] if id(each) in self._ids])
        ]
        self._twin.state = self._optimizer.state
        self._twin.param_groups = [mine for _, mine in self._groups]

    def step(self) -> None:
        """Changes the parameters that have a gradient.

        Raises:
            RuntimeError: the optimizer keeps state in its groups, which belong to all stages.
        """
        if not self._groups:
            return
        self._twin.step()
        for group, mine in self._groups:
            for key, value in mine.items():
                if key != "params" and value is not group.get(key):
                    raise RuntimeError(
                        f"{type(self._optimizer).__name__} keeps {key!r} in its groups, but stages "
                        "step at different times. Use an optimizer whose state is by parameter"
                    )


def stepped(optimizer: Optimizer) -> None:
    """Marks the optimizer as stepped; learning-rate schedulers check this mark."""
    optimizer._opt_called = True  # type: ignore[attr-defined]

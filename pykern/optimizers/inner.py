"""Groups, settings and state that an optimizer of a pipeline shares with its inner optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import settings_of
from ..pipeline.pipeline import Pipeline

Group = dict[str, Any]


def require_one_by_one(optimizer_class: object, why: str) -> None:
    """Raises TypeError, which ends with the reason, for an optimizer that looks at all at once."""
    if optimizer_class is torch.optim.LBFGS:
        raise TypeError(
            "optimizer_class must step parameters one by one, got LBFGS, which looks at all at "
            f"once. {why}"
        )


def groups_of(pipe: Pipeline, params: Iterable[Any] | None) -> list[Group]:
    """The user's groups of parameters; `params` of None gives all parameters that train."""
    if params is None:
        params = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    # torch's Optimizer accepts all forms in which parameters can be given.
    return Optimizer(params, {}).param_groups


def with_settings(groups: Iterable[Group], inner: Iterable[Group]) -> list[Group]:
    """The parameters of groups, with the settings of the inner optimizer's."""
    pairs = zip(groups, inner, strict=True)
    return [settings_of(of) | {"params": group["params"]} for group, of in pairs]


def copy_settings(given: Iterable[Group], to: Iterable[Group]) -> None:
    """Copies the settings of the given groups to other groups."""
    for one, other in zip(given, to, strict=True):
        other.update(settings_of(one))


def show_state(
    optimizer: Optimizer, kept: Mapping[Tensor, Any], stepped: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Makes an optimizer's `state` show the state of its inner optimizer.

    Args:
        optimizer: the outer optimizer.
        kept: the inner optimizer's state, by the tensors that it steps.
        stepped: parameters of the pipeline, each with the tensor that is stepped for it.
    """
    optimizer.state.clear()
    for parameter, one in stepped:
        if one in kept:
            optimizer.state[parameter] = kept[one]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The result of a step's closure, which computes gradients first; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

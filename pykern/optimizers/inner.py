"""Groups, settings and state that an optimizer of a pipeline shares with its inner optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.optimizer_state import settings_of
from ..pipeline.asynchronous import AsyncPipeline
from ..pipeline.pipeline import Pipeline

Group = dict[str, Any]


def require_arguments(pipe: object, optimizer_class: object, why: str) -> None:
    """Raises TypeError for arguments of other kinds, and optimizers that look at all at once.

    The last one's message ends with the reason `why`.
    """
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"pipe must be a Pipeline, got a {type(pipe).__name__}. Give the pipeline that the "
            "model runs in"
        )
    if isinstance(pipe, AsyncPipeline):
        raise TypeError(
            "pipe must be a Pipeline without an optimizer, got an AsyncPipeline. It updates by the "
            "optimizer that it was made with"
        )
    if not callable(optimizer_class):
        raise TypeError(
            "optimizer_class must be a class of optimizers, got an object of "
            f"{type(optimizer_class).__name__}. Give the class itself, and its arguments behind it"
        )
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
    """The parameters of groups and their names, with the settings of the inner optimizer's."""
    pairs = zip(groups, inner, strict=True)
    named = ("params", "param_names")
    return [settings_of(of) | {k: group[k] for k in named if k in group} for group, of in pairs]


def refuse_foreign(parameters: Iterable[Tensor], known: Collection[Tensor]) -> None:
    """Raises ValueError for a parameter that is not among those of the pipeline."""
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(
                f"parameters must be the pipeline's, got one of shape {tuple(parameter.shape)} "
                "that is not"
            )


def copy_settings(given: Iterable[Group], to: Iterable[Group]) -> None:
    """Copies the settings of the given groups to other groups."""
    for one, other in zip(given, to, strict=True):
        other.update(settings_of(one))


def take_settings(
    optimizer: Optimizer, inner: Sequence[Group], stepped: Mapping[Any, Tensor]
) -> None:
    """Gives the inner optimizer's groups the settings of the optimizer's groups.

    Args:
        optimizer: the outer optimizer.
        inner: the groups of the inner optimizer.
        stepped: the inner optimizer's tensor for each parameter.

    Raises:
        ValueError: the user has moved parameters between groups, or has removed some.
    """
    here = [[id(stepped.get(p)) for p in group["params"]] for group in optimizer.param_groups]
    if here != [[id(one) for one in group["params"]] for group in inner]:
        raise ValueError(
            "param_groups must keep their parameters, got groups with others. Make another "
            f"{type(optimizer).__name__}, or call add_param_group"
        )
    copy_settings(optimizer.param_groups, to=inner)


def take_state(
    optimizer: Optimizer, kept: MutableMapping[Any, Any], stepped: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Makes the inner optimizer's state what `state` shows, which the user may have changed.

    Args:
        optimizer: as in `show_state`.
        kept: as in `show_state`.
        stepped: as in `show_state`.
    """
    for parameter, one in stepped:
        if parameter in optimizer.state:
            kept[one] = optimizer.state[parameter]
        else:
            kept.pop(one, None)


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

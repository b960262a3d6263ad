"""An optimizer's state by the names of parameters, out of an optimizer and into a fresh one.

The saved state has the form that torch.distributed.checkpoint uses: `state` by parameter name, and
`param_groups` whose `params` are names.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..plan.files.strict_json import shown
from ..tensors.dtensor import shard_like
from .errors import CheckpointError
from .form import described, require_form, require_names
from .model_state import Commit, parameters_of

Named = dict[str, Any]

# Settings for how an update is computed, which do not change its result; loading keeps them.
_WAYS = ("foreach", "fused", "capturable", "differentiable")
# Numbers that torch's optimizers keep on the CPU, unless the update never leaves the GPU.
_ON_CPU = ("step", "mu_product")


@dataclass(frozen=True)
class OptimizerState:
    """The place of an optimizer's state.

    An optimizer may keep its state for other tensors than the model's, or in several processes. It
    then has three methods: `whole` gives the state to save, `own` gives the state to load into, and
    `adopt` is called after loading. If other processes have to take part in saving, it also has a
    context `saving`, which gives whether this process writes the file.

    Attributes:
        kind: the class of the optimizer that does the work.
        groups: the groups of that optimizer.
        state: the state of that optimizer, by the tensors it steps.
        stepped: gives the tensor that is stepped for a parameter of the model.
        keeps: gives whether this process keeps the state of a parameter.
    """

    kind: type[Optimizer]
    groups: list[dict[str, Any]]
    state: MutableMapping[Any, Any]
    stepped: Callable[[nn.Parameter], Any] = lambda parameter: parameter
    keeps: Callable[[nn.Parameter], bool] = lambda _: True


def _kept(optimizer: Optimizer, method: str) -> OptimizerState:
    of_its_own = getattr(optimizer, method, None)
    if of_its_own is not None:
        return of_its_own()  # type: ignore[no-any-return]
    return OptimizerState(type(optimizer), optimizer.param_groups, optimizer.state)


@contextmanager
def saving(optimizer: Optimizer | None, *, grads: bool) -> Iterator[bool]:
    """The context in which a run is saved; gives whether this process writes the file.

    Raises:
        CheckpointError: gradients were to be saved, but they are spread over several processes.
    """
    of_its_own = getattr(optimizer, "saving", None)
    if of_its_own is None:
        yield True
    elif grads:
        raise CheckpointError(
            f"grads must be False with a {type(optimizer).__name__}, which leaves each process the "
            "gradients of its own parameters alone, got True. Save after an update"
        )
    else:
        with of_its_own() as writes:
            yield writes


def kind_of(optimizer: Optimizer) -> str:
    """The name of the optimizer that does the work."""
    return _kept(optimizer, "own").kind.__name__


def named_state(optimizer: Optimizer, model: nn.Module) -> Named:
    """The optimizer's state and groups with names in the place of parameters.

    Raises:
        CheckpointError: the optimizer trains a parameter that is not in the model, or keeps state
            for something else.
    """
    kept = _kept(optimizer, "whole")
    of_model = parameters_of(model)
    parameters = {name: kept.stepped(each) for name, each in of_model.items()}
    names = _names(parameters)
    groups = []
    for index, group in enumerate(kept.groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise CheckpointError(
                    "the optimizer must train parameters of the model alone, got parameter "
                    f"{position} of its group {index}, {described(parameter)}, which is of another "
                    "model"
                )
        groups.append(settings_of(group) | {"params": [names[each] for each in group["params"]]})
    if strange := [key for key in kept.state if key not in names]:
        raise CheckpointError(
            "the optimizer must keep state for its own parameters, got state for "
            f"{shown(strange[0])}"
        )
    state = {names[parameter]: entries for parameter, entries in kept.state.items()}
    _require_plausible(kept, state, of_model)
    return {"state": state, "param_groups": groups}


def fit_optimizer(optimizer: Optimizer, model: nn.Module, saved: Any) -> Commit:
    """A function that gives the optimizer the saved state and settings; made only if they fit.

    The tensors are made first, on the devices of their parameters.

    Args:
        optimizer: over the same parameters in the same groups; its present state is replaced.
        model: the model that it trains.
        saved: a state in the form that `named_state` returns.

    Raises:
        CheckpointError: groups, names, settings or shapes differ.
    """
    form = isinstance(saved, dict) and saved.keys() == {"state", "param_groups"}
    if not (form and isinstance(saved["state"], dict) and isinstance(saved["param_groups"], list)):
        raise CheckpointError(
            f"the optimizer's part of the file must be an optimizer's state, got {shown(saved)}"
        )
    kept = _kept(optimizer, "own")
    of_model = parameters_of(model)
    parameters = {name: kept.stepped(each) for name, each in of_model.items()}
    groups, theirs = kept.groups, saved["param_groups"]
    if len(groups) != len(theirs):
        raise CheckpointError(
            f"the optimizer must have {len(groups)} groups, as it has here, got {len(theirs)} in "
            "the file"
        )
    settings: list[dict[str, Any]] = []
    for index, (group, saved_group) in enumerate(zip(groups, theirs, strict=True)):
        where = f"group {index} of the optimizer"
        _require_members(kept.kind, group, saved_group, parameters, where)
        settings.append(_fit_settings(group, saved_group, where))
    _require_plausible(kept, saved["state"], of_model)
    group_of = {parameter: group for group in groups for parameter in group["params"]}
    state: dict[Tensor, Any] = {
        parameters[name]: _placed(
            entries, of_model[name], parameters[name].device, group_of[parameters[name]]
        )
        for name, entries in saved["state"].items()
        if kept.keeps(of_model[name])
    }

    def commit() -> None:
        kept.state.clear()
        kept.state.update(state)
        for group, values in zip(groups, settings, strict=True):
            group.update(values)
        getattr(optimizer, "adopt", lambda: None)()

    return commit


def _names(parameters: dict[str, nn.Parameter]) -> dict[object, str]:
    """The first name of each parameter."""
    names: dict[object, str] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, name)
    return names


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of an optimizer's group but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _require_members(
    kind: type[Optimizer],
    group: dict[str, Any],
    saved: Any,
    parameters: dict[str, nn.Parameter],
    where: str,
) -> None:
    """Refuses a saved group of other parameters."""
    names = saved.get("params") if isinstance(saved, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where} must have a list of names in the file, got {shown(saved)}")
    first = _names(parameters)
    # A tied parameter may have been saved by another of its names.
    theirs = [first[parameters[name]] if name in parameters else name for name in names]
    ours = [first.get(parameter, "one that is not in the model") for parameter in group["params"]]
    require_names(set(ours), set(theirs), where)
    if len(ours) != len(theirs):
        raise CheckpointError(
            f"{where} must have {len(ours)} parameters, as it has here, got {len(theirs)} in the "
            "file"
        )
    if ours != theirs and issubclass(kind, torch.optim.LBFGS):
        raise CheckpointError(
            f"{where} must have its parameters in the order of the file, which LBFGS depends on, "
            "got another order"
        )


def _fit_settings(group: dict[str, Any], saved: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings that a group takes from the file, including settings that only the file has."""
    settings = {}
    for key, value in settings_of(saved).items():
        if key in group and key in _WAYS:
            continue
        require_form(group.get(key), value, f"{where}: {key}")
        here = group.get(key)
        settings[key] = value.to(here.device) if isinstance(here, Tensor) else value
    return settings


def _require_plausible(
    kept: OptimizerState, state: dict[str, Any], of_model: dict[str, nn.Parameter]
) -> None:
    """Refuses state of untrained parameters, and shapes that torch's optimizers never have."""
    trained = {id(parameter) for group in kept.groups for parameter in group["params"]}
    of_torch = kept.kind.__module__.startswith("torch.optim")
    for name, entries in state.items():
        if name not in of_model or id(kept.stepped(of_model[name])) not in trained:
            raise CheckpointError(
                "the optimizer's state must be of parameters that it trains, got state of "
                f"{shown(name)}"
            )
        if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
            raise CheckpointError(
                f"the optimizer's state of {name} must be a dict with names as keys, got "
                f"{shown(entries)}"
            )
        if of_torch and not issubclass(kept.kind, torch.optim.LBFGS):
            for key, value in entries.items():
                _require_part(value, of_model[name], f"the optimizer's {key} of {name}")


def _require_part(value: Any, parameter: Tensor, where: str) -> None:
    """Refuses a tensor whose dimensions are neither 1 nor those of the parameter."""
    if not isinstance(value, Tensor):
        return
    shape = (1,) * (parameter.dim() - value.dim()) + tuple(value.shape)
    fits = len(shape) == parameter.dim() and all(
        size in (1, full) for size, full in zip(shape, parameter.shape, strict=True)
    )
    if not fits or not (value.is_floating_point() or value.dtype == parameter.dtype):
        raise CheckpointError(
            f"{where} must have the shape and kind of dtype of its parameter, "
            f"{described(parameter)}, got {described(value)}"
        )


def _placed(
    entries: dict[str, Any], parameter: Tensor, device: torch.device, group: dict[str, Any]
) -> dict[str, Any]:
    """The state of a parameter that is stepped on a device, each tensor on its proper device."""
    stays = not (group.get("capturable") or group.get("fused"))

    def placed(value: Any, on: torch.device) -> Any:
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
            # The tensor gets the layout of the parameter, as when the optimizer makes it.
            there = torch.empty_like(parameter, dtype=value.dtype, device=on)
            return there.copy_(shard_like(parameter, value))
        if isinstance(value, list):
            return [placed(item, on) for item in value]
        return value.to(on, copy=True) if isinstance(value, Tensor) else value

    cpu = torch.device("cpu")
    return {
        key: placed(value, cpu if stays and key in _ON_CPU else device)
        for key, value in entries.items()
    }

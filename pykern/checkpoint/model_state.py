"""A model's tensors by their own names, out of a model and back into one."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..plan.files.strict_json import shown
from ..tensors.dtensor import local, shard_like
from ..tensors.parameters import gradient_dtype
from .errors import CheckpointError
from .file import Tensors, digest, require_storable
from .form import require_like, require_names

# The part that `torch.compile` adds to the names of a layer's parameters.
_COMPILED = "_orig_mod."

Commit = Callable[[], None]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters and buffers (not copies), as `state_dict` names them.

    A layer that `torch.compile` has wrapped keeps the names that it had before.

    Raises:
        CheckpointError: an entry is not a plain tensor.
    """
    named = {
        name.replace(_COMPILED, ""): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    for name, tensor in named.items():
        require_storable(name, tensor)
    return named


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name; a tied parameter has several names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name.replace(_COMPILED, ""): parameter for name, parameter in named}


def add_model(model: nn.Module, tensors: Tensors) -> dict[str, str]:
    """Puts the model's tensors among those of the file, tied ones once.

    Returns:
        The key of each name; it is the name itself, or for a tied tensor its first name.
    """
    keys: dict[object, str] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors_of(model).items():
        place = _place(tensor)
        if place not in keys:
            keys[place] = tensors.add(name, tensor)
        names[name] = keys[place]
    return names


def fit_model(model: nn.Module, saved: Mapping[str, Tensor]) -> Commit:
    """A function that copies the saved tensors into the model; made only if all of them fit.

    Raises:
        CheckpointError: names, shapes or dtypes differ, or tied tensors differ in the file.
    """
    here = tensors_of(model)
    require_names(here.keys(), saved.keys(), "the model")
    first: dict[object, str] = {}
    for name, tensor in here.items():
        require_like(tensor, saved[name], name)
        if any(
            size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            raise CheckpointError(
                f"{name} must have memory for each of its rows, got an expanded tensor, which "
                "cannot be loaded into. Use its clone()"
            )
        other = first.setdefault(_place(tensor), name)
        if saved[other] is not saved[name] and digest(saved[other]) != digest(saved[name]):
            raise CheckpointError(
                f"{other} and {name} must be equal in the file, since they are tied here, got "
                "different tensors. Untie them"
            )

    def commit() -> None:
        with torch.no_grad():
            for name, tensor in here.items():
                tensor.copy_(shard_like(tensor, saved[name]))

    return commit


def _place(tensor: Tensor) -> object:
    """A key that is equal for tied tensors, which share their memory."""
    mine = local(tensor)
    if mine.numel() == 0:
        return id(tensor)
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()


def add_grads(model: nn.Module, tensors: Tensors) -> dict[str, str]:
    """Puts the existing gradients among the file's tensors; returns the key of each name.

    Raises:
        CheckpointError: each process has gradients of its own, which no process could sum again.
    """
    if getattr(model, "has_own_gradients", False):
        raise CheckpointError(
            "grads must be False after a step within no_sync, got True: each process has gradients "
            "of its own, and a run that goes on would take the first one's. Save after a step "
            "outside of no_sync"
        )
    return {
        (plain := name.replace(_COMPILED, "")): tensors.add(f"grads/{plain}", parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def fit_grads(model: nn.Module, saved: Mapping[str, Tensor]) -> Commit:
    """A function that sets the gradients of all parameters; a gradient not saved becomes None.

    Raises:
        CheckpointError: a gradient belongs to no parameter, or does not fit its parameter.
    """
    parameters = parameters_of(model)
    if strange := sorted(saved.keys() - parameters.keys()):
        raise CheckpointError(
            f"a gradient must be of a parameter of the model, got one of {shown(strange[0])} in "
            "the file"
        )
    grads: dict[nn.Parameter, Tensor] = {}
    for name, grad in saved.items():
        parameter = parameters[name]
        there = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
        require_like(there, grad, f"the gradient of {name}")
        if parameter in grads:
            raise CheckpointError(
                f"{name} must have one gradient in the file, since it is tied here, got two. Untie "
                "the parameters"
            )
        grads[parameter] = there.copy_(shard_like(parameter, grad))

    def commit() -> None:
        for parameter in model.parameters():
            parameter.grad = grads.get(parameter)

    return commit

"""The bridge to torch.distributed.checkpoint (DCP), without a process group.

For trusted files only: torch unpickles a DCP folder's metadata, and a pickle can run any program.
DCP has model and optimizer; what else a run needs is in `save` and `load`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ..tensors.dtensor import is_dtensor
from .asked import require_kinds
from .errors import CheckpointError
from .model_state import fit_model, tensors_of
from .optimizer_state import fit_optimizer, named_state

# The keys under which torch's guides have them.
_MODEL = "model"
_OPTIMIZER = "optim"


def to_dcp(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> None:
    """Writes a DCP folder that other programs load by `model` and `optim`.

    It has the form of `torch.distributed.checkpoint.state_dict.get_state_dict`, so they may load it
    under FSDP or in any number of processes.

    Args:
        folder: is made if it is not there; a checkpoint in it is overwritten, not at once.
        model: a `Pipeline` or any module; its names are its own.
        optimizer: over parameters of the model.

    Raises:
        TypeError: the model is not a module, or the optimizer not an optimizer.
        CheckpointError: something is of a kind that cannot be saved, or sharded over processes.
    """
    require_kinds(model, optimizer)
    if hasattr(optimizer, "saving"):
        raise CheckpointError(
            f"optimizer must have its state in each process, got a {type(optimizer).__name__}, "
            "which shares it out. Use pykern.checkpoint.save, in every process"
        )
    if any(map(is_dtensor, model.parameters())):
        raise CheckpointError(
            "model must be whole in each process, got one sharded over processes. Save its "
            "state_dict() and that of the optimizer with torch.distributed.checkpoint itself, "
            "which knows DTensors"
        )
    state: dict[str, Any] = {
        _MODEL: {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    }
    if optimizer is not None:
        state[_OPTIMIZER] = named_state(optimizer, model)
    with _one_process():
        save(state, checkpoint_id=folder, no_dist=True)


def from_dcp(
    folder: str | PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> None:
    """Reads model and optimizer from a DCP folder, written by however many processes.

    Only for folders that you trust: reading one can run code that it holds.

    Args:
        folder: with `model` and, if an optimizer is given, `optim`, as `to_dcp` writes them.
        model: with the same names, shapes and dtypes; a `Pipeline` or any module.
        optimizer: over the same parameters, fresh or not.

    Raises:
        TypeError: the model is not a module, or the optimizer not an optimizer.
        CheckpointError: the folder does not hold what is asked for, or it does not fit. Nothing has
            been changed.
    """
    require_kinds(model, optimizer)
    asked = (_MODEL,) if optimizer is None else (_MODEL, _OPTIMIZER)
    state = _read(folder, asked)
    commits = [fit_model(model, state[_MODEL])]
    if optimizer is not None:
        commits.append(fit_optimizer(optimizer, model, state[_OPTIMIZER]))
    for commit in commits:
        commit()


def _read(folder: str | PathLike[str], asked: tuple[str, ...]) -> dict[str, Any]:
    metadata = FileSystemReader(folder).read_metadata()
    # From the keys of the file to the keys of each level.
    paths = {key: path for key, path in (metadata.planner_data or {}).items() if path[0] in asked}
    flat: dict[str, Any] = {}
    for key in paths:
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        else:
            flat[key] = None
    with _one_process():
        load(flat, checkpoint_id=folder, no_dist=True)
    state: dict[Any, Any] = {}
    for key, (*levels, last) in paths.items():
        level = state
        for each in levels:
            level = level.setdefault(each, {})
        level[last] = flat[key]
    if _OPTIMIZER in state:
        # A folder has no entries for a dict without entries, such as the state of plain SGD.
        state[_OPTIMIZER].setdefault("state", {})
    if missing := [name for name in asked if name not in state]:
        raise CheckpointError(
            f"folder must hold {missing[0]!r}, got {folder} without it. Name a folder that pykern "
            "wrote"
        )
    return {name: _with_lists(state[name]) for name in asked}


def _with_lists(level: Any) -> Any:
    """The same, where a level whose keys are numbers is a list."""
    if not isinstance(level, dict):
        return level
    values = {key: _with_lists(value) for key, value in level.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[index] for index in sorted(values)]
    return values


@contextmanager
def _one_process() -> Iterator[None]:
    """Without torch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield

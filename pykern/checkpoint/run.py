"""Save and load of a training run: a model, its optimizer and the rest of the training state."""

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..modes import as_before
from ..plan.files.strict_json import shown
from ..tensors.dtensor import is_dtensor
from . import file
from .asked import require_kinds
from .errors import CheckpointError
from .file import Saved, Tensors
from .form import require_form
from .model_state import Commit, add_grads, add_model, fit_grads, fit_model
from .optimizer_state import fit_optimizer, kind_of, named_state, saving
from .random_state import fit_random, random_state
from .tree import decode, encode


def save(  # noqa: PLR0913 - all that a run is made of, by keyword
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    extra: Any = None,
    rng: bool = True,
    grads: bool = False,
) -> None:
    """Writes a training run to a file, which is replaced atomically.

    A reader finds the former file or the complete new one, even if the writer is killed. Tensors
    may be on any devices. If any part cannot be written, nothing is written.

    With a `ZeroOptimizer` all processes call this function, and the first writes one file for all.
    The file has the first process's random state, and the optimizer state in the form of a plain
    optimizer of one process.

    A model that is sharded over processes (tensor parallel) is saved whole: all processes call this
    function, the first one writes, and all return when the file is there.

    Args:
        path: the file; its folder exists. A symbolic link is replaced, not followed.
        model: a `Pipeline` or any module. Its `state_dict` is saved under its own names; tied
            tensors once.
        optimizer: over parameters of the model. Its state is saved by their names.
        scheduler: of the learning rate.
        scaler: of the gradients.
        extra: other values that the run needs: tensors, numbers, strings, booleans and None, in
            lists, tuples and dicts.
        rng: whether to save the states of torch's, Python's and numpy's global generators.
        grads: whether to save `.grad`, for a run that is saved within gradient accumulation.

    Raises:
        TypeError: the model is not a module, the optimizer not an optimizer, or another one lacks
            a state.
        CheckpointError: a value is of a kind that the file cannot hold; the message names it. Or
            another process could not write the file.
        OSError: the file cannot be written.
    """
    require_kinds(model, optimizer, scheduler=scheduler, scaler=scaler)
    with saving(optimizer, grads=grads) as writes:
        if not writes:
            return
        tensors = Tensors()
        # The model is added first, so that each of its tensors has its own name in the file.
        names = add_model(model, tensors)
        kept = None
        if optimizer is not None:
            kept = {"type": kind_of(optimizer), **named_state(optimizer, model)}
        values = {
            "optimizer": kept,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": random_state() if rng else None,
            "extra": extra,
        }
        parts = {name: encode(value, name, tensors.add) for name, value in values.items()}
        parts |= {"model": names, "grads": add_grads(model, tensors) if grads else None}
        _write_once(model, lambda: file.write(Path(path), parts, tensors))


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    rng: bool = True,
) -> Any:
    """Reads a training run into a model, and into the other given objects.

    The file may be untrusted: it is read as data, and all requested parts are checked before the
    first change. Parts that are not requested stay in the file, but saved gradients are always set.

    If the model is sharded over processes, each of them reads the file. The file may have been
    written by any number of processes.

    Args:
        path: a file that `save` wrote.
        model: a model with the same names, shapes and dtypes; it may be cut into other stages, on
            other devices, in a `Pipeline` or not.
        optimizer: of the same type over the same parameters, fresh or not. Settings such as the
            learning rate are taken from the file; settings for how updates are computed
            (`foreach`, `fused`, `capturable`, `differentiable`) stay.
        scheduler: of the same type, made on this optimizer.
        scaler: enabled if the saved scaler was.
        rng: whether to set the random generators.

    Returns:
        The `extra` that was saved.

    Raises:
        TypeError: the model is not a module, the optimizer not an optimizer, or another one lacks
            a state.
        CheckpointError: the file is not a checkpoint, is damaged, lacks a requested part, or does
            not fit. Nothing has been changed.
        OSError: the file cannot be read.
    """
    require_kinds(model, optimizer, scheduler=scheduler, scaler=scaler)
    with as_before():
        with file.reading(Path(path)) as saved:
            # Steps that call foreign code come first: if one fails, nothing has been changed.
            commits = []
            if scheduler is not None:
                commits.append(_fit_scheduler(scheduler, saved))
            if scaler is not None:
                commits.append(_fit_scaler(scaler, saved))
            commits.append(fit_model(model, _tensors(saved, "model")))
            if saved.parts["grads"] is not None:
                commits.append(fit_grads(model, _tensors(saved, "grads")))
            if optimizer is not None:
                commits.append(_fit_optimizer(optimizer, model, saved))
            if rng:
                commits.append(fit_random(_part(saved, "rng")))
            extra = decode(saved.parts["extra"], saved.tensor)
        for commit in commits:
            commit()
    return extra


def _write_once(model: nn.Module, write: Callable[[], None]) -> None:
    """Makes the first of the model's processes write; all processes return after that.

    Raises:
        CheckpointError: the first process could not write.
        BaseException: this is the first process, and `write` raised it.
    """
    parameters: Iterator[Any] = model.parameters()
    mesh = next((one.device_mesh for one in parameters if is_dtensor(one)), None)
    if mesh is None:
        write()
        return
    failed: BaseException | None = None
    if mesh.get_local_rank() == 0:
        try:
            write()
        except BaseException as error:
            failed = error
    told = torch.tensor(failed is not None, device=mesh.device_type)
    dist.broadcast(told, group=mesh.get_group(), group_src=0)
    if failed is not None:
        raise failed
    if told:
        raise CheckpointError(
            "the first of the processes with shards of the model could not write. Its own message "
            "says why"
        )


def _part(saved: Saved, name: str) -> Any:
    """A requested part."""
    if saved.parts[name] is None:
        raise CheckpointError(
            f"{name} must be in the file to be loaded, got a file without it. Load with "
            f"{name}={False if name == 'rng' else None}"
        )
    return decode(saved.parts[name], saved.tensor)


def _tensors(saved: Saved, part: str) -> dict[str, Tensor]:
    """The tensors of a part that gives the key of each name."""
    keys = saved.parts[part]
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise CheckpointError(f"{part} must be a table of names in the file, got {shown(keys)}")
    return {name: saved.tensor(key) for name, key in keys.items()}


def _fit_scheduler(scheduler: LRScheduler, saved: Saved) -> Commit:
    state = _part(saved, "scheduler")
    require_form(scheduler.state_dict(), state, "the scheduler")
    return lambda: scheduler.load_state_dict(state)


def _fit_scaler(scaler: torch.amp.GradScaler, saved: Saved) -> Commit:
    here, state = scaler.state_dict(), _part(saved, "scaler")
    require_form(here, state, "the scaler")
    for name, value in here.items():
        dtype = torch.int32 if type(value) is int else torch.float32
        try:
            # The scaler will fill its tensor in the same way.
            torch.zeros((), dtype=dtype, device="cpu").fill_(state[name])
        except (OverflowError, RuntimeError) as error:
            raise CheckpointError(
                f"{name} of the scaler must be a number that fits its tensor, got "
                f"{shown(state[name])} in the file"
            ) from error
    return lambda: scaler.load_state_dict(state)


def _fit_optimizer(optimizer: Optimizer, model: nn.Module, saved: Saved) -> Commit:
    kept = _part(saved, "optimizer")
    kind = kind_of(optimizer)
    saved_kind = kept.pop("type", None) if isinstance(kept, dict) else None
    if saved_kind != kind:
        raise CheckpointError(
            f"optimizer must be of the class that was saved, {shown(saved_kind)}, got {kind}"
        )
    return fit_optimizer(optimizer, model, kept)

"""Save and load of a training run: a model, all that trains it, and what else it needs."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..modes import as_before
from ..plan.files.strict_json import shown
from . import file
from .errors import CheckpointError
from .file import Saved, Tensors
from .form import require_form
from .model_state import Commit, add_grads, add_model, fit_grads, fit_model
from .optimizer_state import fit_optimizer, kind_of, named_state, saving
from .random_state import fit_random, random_state
from .together import write_once
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
    """Writes a training run to a file, which is replaced at once.

    A reader, or what is left after the writer was killed, is the file from before or the new one,
    whole. Tensors may be on any devices. Nothing is written if anything cannot be.

    With a `ZeroOptimizer` all processes call it, and the first writes, one file for all: with its
    random state, and the optimizer's as a plain optimizer of one process has it.

    A model that is sharded over processes (tensor parallel) is saved whole: all of them call this,
    the first of them writes, and all return when the file is there.

    Args:
        path: the file; its folder exists. A symbolic link is replaced, not followed.
        model: a `Pipeline` or any module. Its `state_dict` is saved under its own names; tied
            tensors once.
        optimizer: over parameters of the model. Its state is saved by their names.
        scheduler: of the learning rate.
        scaler: of the gradients.
        extra: what else the run needs: tensors, numbers, strings, booleans and None, in lists,
            tuples and dicts.
        rng: whether to save the states of torch's, Python's and numpy's global generators.
        grads: whether to save what `.grad` holds, for a run saved between two steps of an
            accumulation.

    Raises:
        CheckpointError: something is of a kind that the file cannot hold; the message names it. Or
            another process could not write the file.
        OSError: the file cannot be written.
    """
    with saving(optimizer, grads=grads) as writes:
        if not writes:
            return
        tensors = Tensors()
        # First, so that each of the model's tensors has its own name in the file.
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
        write_once(model, lambda: file.write(Path(path), parts, tensors))


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    rng: bool = True,
) -> Any:
    """Reads a training run into a model, and what is given beside it.

    The file may be anybody's: it is read as data, and all that is asked for is checked before the
    first change. What is not asked for stays in the file, but gradients that were saved are set.

    Each of the processes that a model is sharded over reads the file, which any number of them may
    have written.

    Args:
        path: what `save` wrote.
        model: with the same names, shapes and dtypes; cut in other stages, on other devices, in a
            `Pipeline` or not.
        optimizer: of the same type over the same parameters, fresh or not. Learning rate and the
            like become those of the file; how it computes (`foreach`, `fused`, `capturable`,
            `differentiable`) stays.
        scheduler: of the same type, made on this optimizer.
        scaler: enabled if the saved one was.
        rng: whether to set the random generators.

    Returns:
        The `extra` that was saved.

    Raises:
        CheckpointError: the file is no checkpoint, is damaged, does not hold what is asked for, or
            does not fit. Nothing has been changed.
        OSError: the file cannot be read.
    """
    with as_before():
        with file.reading(Path(path)) as saved:
            # Steps that call foreign code come first: if one fails, nothing has been changed.
            commits = [
                _fit_scheduler(scheduler, saved),
                _fit_scaler(scaler, saved),
                fit_model(model, _tensors(saved, "model")),
            ]
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


def _part(saved: Saved, name: str) -> Any:
    """A part that is asked for."""
    if saved.parts[name] is None:
        raise CheckpointError(f"the file holds no {name}; load with {name}={_WITHOUT[name]}")
    return decode(saved.parts[name], saved.tensor)


_WITHOUT = {"optimizer": "None", "scheduler": "None", "scaler": "None", "rng": "False"}


def _tensors(saved: Saved, part: str) -> dict[str, Tensor]:
    """The tensors of a part that gives the key of each name."""
    keys = saved.parts[part]
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys.values()):
        raise CheckpointError(f"{part} is no table of names: {shown(keys)}")
    return {name: saved.tensor(key) for name, key in keys.items()}


def _fit_scheduler(scheduler: LRScheduler | None, saved: Saved) -> Commit:
    if scheduler is None:
        return lambda: None
    state = _part(saved, "scheduler")
    require_form(scheduler.state_dict(), state, "the scheduler")
    return lambda: scheduler.load_state_dict(state)


def _fit_scaler(scaler: torch.amp.GradScaler | None, saved: Saved) -> Commit:
    if scaler is None:
        return lambda: None
    here, state = scaler.state_dict(), _part(saved, "scaler")
    require_form(here, state, "the scaler")
    for name, value in here.items():
        dtype = torch.int32 if type(value) is int else torch.float32
        try:
            # As the scaler will.
            torch.zeros((), dtype=dtype).fill_(state[name])
        except (OverflowError, RuntimeError) as error:
            raise CheckpointError(f"the scaler: {name} is {shown(state[name])}") from error
    return lambda: scaler.load_state_dict(state)


def _fit_optimizer(optimizer: Optimizer, model: nn.Module, saved: Saved) -> Commit:
    kept = _part(saved, "optimizer")
    kind = kind_of(optimizer)
    saved_kind = kept.pop("type", None) if isinstance(kept, dict) else None
    if saved_kind != kind:
        raise CheckpointError(f"the optimizer is {kind} here, {shown(saved_kind)} in the file")
    return fit_optimizer(optimizer, model, kept)

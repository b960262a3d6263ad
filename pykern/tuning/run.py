"""Tuning: measure a model, search by simulation, run the best."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import _C
from ..boxes import Box, load
from ..pipeline.left_alone import left_alone
from ..runtime.devices import Devices
from ..runtime.loss import Loss
from ..runtime.recompute.buffers import modules_in
from .asked import Asked
from .box_costs import box_costs
from .cache import measured_once
from .choice import Choice
from .measurements import Measurements
from .progress import Tell, told
from .search import ProposalSearch
from .trial import run_in_turn
from .weigh import weighed_finalists

# The number of proposals that are run.
TRIED = 6


class TuneInterrupted(KeyboardInterrupt):
    """Ctrl-C while the best proposals were run.

    Attributes:
        choice: the choice at that time; the proposals that have run come first.
    """

    def __init__(self, choice: Choice) -> None:
        super().__init__("interrupted; the choice of what is known by now is in .choice")
        self.choice = choice


def tune(  # noqa: PLR0913 - a pipeline and what it trains with, by keyword
    model: nn.Module | Sequence[nn.Module],
    *,
    sample: Any,
    loss_fn: Loss,
    devices: Devices,
    target: Any = None,
    batch_size: int | None = None,
    memory: float | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    whole: Sequence[str] = (),
    resume: str | os.PathLike[str] | None = None,
    box: Box | str | os.PathLike[str] | None = None,
    **more: Any,
) -> Choice:
    """Finds the pipeline whose steps take the least time on devices of this machine.

    First steps of the model show what each place between two possible cuts takes, for microbatches
    of several sizes. Then all schedules, with their options, numbers of microbatches and replicas
    are simulated, each with the cut that is best for it, and the best six are run. A microbatch
    through their stages tells their bytes, as `pipe.memory` does. The model's
    gradients, state and devices and the random numbers are afterwards as before. On a terminal, a
    bar shows how far this is.

    Args:
        model: as for `Pipeline`.
        sample: inputs of a batch, or of as many rows as there are: a tensor, a tuple of arguments
            or a dict of keyword arguments. Larger batches repeat its rows.
        loss_fn: as for `Pipeline`.
        devices: as for `Pipeline`: CPU workers, or whole GPUs, which are taken to be alike.
        target: of the loss for the sample; None where `step` gets none.
        batch_size: rows of a step's batch; None for those of the sample.
        memory: bytes that each device has for parameters, gradients, the state of the optimizer and
            activations; None for nine tenths of a GPU's, and any number for CPU workers. Where
            they are too few, microbatches are recomputed.
        optimizer: as for `estimate`; counts in `memory` only.
        whole: as for `Pipeline`.
        resume: a file for the measurements. If it has those of this model, nothing is measured. If
            it cannot be written at last, as on a full disk, a warning tells so.
        box: a profile, its file or its name, to choose for its devices instead. Units are measured
            on `devices`, one of which is enough, and which must be like those of the box. Nothing
            is run then, and `memory` is that of each device of the box.
        **more: further arguments of the pipelines that are run, such as `reduction="sum"`.

    Returns:
        The proposals, the best first.

    Raises:
        TypeError, ValueError, CutError: an argument is wrong, the model cannot be cut for so many
            devices, no plan fits in the memory, or the box lacks a figure.
        OSError: a file cannot be read.
        TuneInterrupted: Ctrl-C, once proposals are known; its `choice` has them. Before that a
            plain KeyboardInterrupt is raised. The file of `resume` is written as soon as
            everything is measured.
        BaseException: what the model raises for the sample.
    """
    profile = box if box is None or isinstance(box, Box) else load(box)
    asked = Asked(
        model, sample, loss_fn, devices, target, batch_size, memory, optimizer, whole, more, profile
    )
    models = [*(model if isinstance(model, Sequence) else [model]), loss_fn]
    with left_alone(models, map(torch.device, {"cpu", *asked.names})), _moved_back(models):
        with told("measuring") as tell:
            measured = measured_once(asked, None if resume is None else Path(resume), tell)
        if profile is not None:
            measured = box_costs(asked, measured, profile)
        with told("searching") as tell:
            search = searched(asked, measured, tell)
        if profile is not None:
            return Choice(asked, measured, tuple(search.best), search.num_simulated)
        return _tried(asked, measured, search)


def searched(asked: Asked, measured: Measurements, tell: Tell) -> ProposalSearch:
    """The completed search through all proposals."""
    search = ProposalSearch(
        measured,
        len(asked.site.names),
        asked.rows,
        asked.site.memory,
        replicated=asked.can_have_replicas,
    )
    search.run(tell)
    return search


def _tried(asked: Asked, measured: Measurements, search: ProposalSearch) -> Choice:
    """The choice after the best proposals have run."""
    finalists = ran = search.finalists(TRIED)
    interrupted = None
    try:
        with told("weighing the best") as tell:
            finalists = ran = weighed_finalists(asked, search, TRIED, tell)
        with told("running the best") as tell:
            for now in run_in_turn(asked, finalists, tell):
                ran = now
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    rest = [one for one in search.best if one not in finalists]
    choice = Choice(asked, measured, (*ran, *rest), search.num_simulated)
    if interrupted is not None:
        raise TuneInterrupted(choice) from interrupted
    return choice


@contextmanager
def _moved_back(models: Sequence[object]) -> Iterator[None]:
    """A context after which parameters are on the devices of before.

    Args:
        models: modules, among other objects that are passed over, such as a plain loss function.
    """
    modules = modules_in(models)
    homes = {
        p: p.device for module in modules for p in module._parameters.values() if p is not None
    }
    with _C.Undo(_move_back, homes):
        yield


def _move_back(homes: dict[nn.Parameter, torch.device]) -> None:
    for parameter, home in homes.items():
        if parameter.device != home:
            # The gradients of measured steps are on the GPU, too.
            parameter.grad = None
            parameter.data = parameter.data.to(home)

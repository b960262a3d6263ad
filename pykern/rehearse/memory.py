"""Whether a step of a rehearsed pipeline fits the GPUs of its box."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..budget.budget import Budget
from ..pipeline.build import Built, Design
from ..pipeline.request import Request
from ..runtime.batch import Batch
from ..runtime.loss import Loss
from ..runtime.mapped import Mapped
from ..sizes.changes import PlannedStep, changes
from ..sizes.estimates import Bytes, Estimate
from ..sizes.step_model import StepModel
from .lines import line_of_error
from .optimizers import MakeLike, like
from .setting import Setting

_COMPUTED = (
    "bytes are those of the first microbatch, which the CPU computed, since the step looks at "
    "values: {}"
)
_NO_STATE = "without the state of the optimizer, whose step could not be tried"


@dataclass(frozen=True)
class Fit:
    """The memory that a step takes.

    Attributes:
        found: of each device of the plan; None where it is not known.
        memory: by GPU, the bytes that the step takes, and those of the box; None likewise.
        notes: what is left out, or why nothing is known.
        change: the cheapest change with which it fits; None if it fits, or if none is known.
    """

    found: Estimate | None
    memory: Mapping[int, tuple[float, float | None]]
    notes: Sequence[str]
    change: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where it is not known."""
        known = [(takes, has) for takes, has in self.memory.values() if has is not None]
        return all(takes <= has for takes, has in known) if known else None

    @property
    def devices(self) -> Sequence[Bytes]:
        """The bytes of each device of the plan; empty where it is not known."""
        return () if self.found is None else self.found.devices


def fit_of(asked: Request, of: Design, made: Built, batch: Batch, at: Setting) -> Fit:
    """The memory of this batch's step, by `pykern.estimate`."""
    args, named, target = batch.given
    layers = nn.ModuleList(layer for stage in made.executor.stages for layer in stage.originals)
    if args and named:
        return Fit(None, {}, ["bytes are not known where step gets arguments by place and by name"])
    optimizer = at.optimizers.of(layers)
    loss_fn: Any = batch.finish.loss if isinstance(batch.finish, Mapped) else asked.loss_fn
    model = _model(asked, of, loss_fn, like(optimizer) if optimizer else None)
    notes = _of_optimizer(optimizer, layers)
    recompute: Any = made.levels if isinstance(asked.recompute, Budget) else asked.recompute
    inputs = named or (args[0] if len(args) == 1 else args)
    asked_for = PlannedStep(inputs, target, of.plan.num_microbatches, recompute, model)
    step, found, told = _first_known(asked_for)
    notes += told
    if found is None:
        return Fit(None, {}, notes)
    fit = Fit(found, _by_gpu(found, asked, at), notes)
    if fit.fits is not False:
        return fit
    tried = ((name, Fit(then, _by_gpu(then, asked, at), ())) for name, then in changes(step))
    change = next((name for name, then in tried if then.fits), None)
    return Fit(found, fit.memory, notes, change)


def _of_optimizer(optimizer: Optimizer | None, layers: nn.Module) -> list[str]:
    """Why the bytes of the optimizer's state may not be those of the script."""
    if optimizer is None:
        return ["no optimizer was made before the first step: without its state"]
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    trained = [id(one) for one in layers.parameters() if one.requires_grad]
    if held.issuperset(trained):
        return []
    name = type(optimizer).__name__
    return [f"the state of {name} is counted for all parameters that train, which it lacks in part"]


def _first_known(step: PlannedStep) -> tuple[PlannedStep, Estimate | None, list[str]]:
    """The first form of the step whose bytes are known, with them, and notes on that form.

    A forward or an optimizer may look at values, as `.item()` does. Tensors without values cost
    neither memory nor time, so they are tried before the CPU computes a microbatch.
    """
    reasons: list[str] = []
    for form, notes in _forms(step):
        try:
            return form, form.estimate(), [note.format(reasons[0]) for note in notes]
        except Exception as error:
            reasons.append(_reason(error))
    return step, None, [f"bytes are not known, since a microbatch did not run: {reasons[-1]}"]


def _forms(step: PlannedStep) -> Iterator[tuple[PlannedStep, list[str]]]:
    computed = replace(step, of=replace(step.of, with_values=True))
    yield step, []
    yield computed, [_COMPUTED]
    if step.of.optimizer is not None:
        for form, notes in ((step, []), (computed, [_COMPUTED])):
            yield replace(form, of=replace(form.of, optimizer=None)), [*notes, _NO_STATE]


def _reason(error: Exception) -> str:
    # Where an optimizer's step raises, that is the cause of the error.
    cause = error.__cause__ or error
    line, text = line_of_error(cause), str(cause) or type(cause).__name__
    return text if line is None else f"{text}, at {line}"


def _model(asked: Request, of: Design, loss_fn: Loss, optimizer: MakeLike | None) -> StepModel:
    """The model of the pipeline that the script asks for."""
    model: Any = asked.model
    balance = asked.balance
    if balance == "time" or asked.speeds is not None:
        balance = [len(layers) for layers in of.partition.stages]
    return StepModel(
        model,
        len(asked.lanes),
        loss_fn,
        optimizer,
        schedule=of.plan if asked.replicas > 1 else asked.schedule,
        balance=balance,
        split_at=None if balance is not asked.balance else asked.split_at,
        whole=asked.whole,
        options={} if asked.replicas > 1 else asked.options,
    )


def _by_gpu(found: Estimate, asked: Request, at: Setting) -> dict[int, tuple[float, float | None]]:
    takes: dict[int, float] = {}
    for lane, device in zip(asked.lanes, found.devices, strict=True):
        takes[lane.device.index] = takes.get(lane.device.index, 0.0) + device.total
    return {gpu: (total, at.box.devices[gpu].memory_bytes) for gpu, total in takes.items()}

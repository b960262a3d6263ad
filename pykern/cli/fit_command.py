"""`pykern fit`: whether a training step fits the memory of its devices, before there are any."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..schedules import require_named
from .errors import bad_input
from .schedule_options import Given, of_schedule, require_owned, with_schedule_options
from .sources import CATALOGUE
from .values import BoxProfile, Microbatches, RecomputeLevel, amount_option, number_option
from .workloads import ModelSource, require_source, workload_of

if TYPE_CHECKING:
    from ..boxes import Box
    from ..rehearse.lines import Line
    from ..sizes import Estimate

GIB = 2**30
NUM_DEVICES = 8
MEMORY_GIB = 80.0

DEVICES = number_option(about=f"Devices; if not given those of --box, or {NUM_DEVICES}.")
MEMORY = amount_option(
    least=0,
    about=f"Memory of each device, in GiB; if not given that of --box, or {MEMORY_GIB:g}.",
    show_default=False,
)
OPTIMIZER = typer.Option(help="A class of torch.optim, or none to leave its state out.")


class Room(NamedTuple):
    """The memory of each device, in bytes, and the box that tells it."""

    memory: tuple[float, ...]
    box: "Box | None"

    def __str__(self) -> str:
        ends = dict.fromkeys(f"{of(self.memory) / GIB:.4g}" for of in (min, max))
        told = "" if self.box is None else f" of {self.box.name} ({self.box.basis})"
        return f"{' to '.join(ends)} GiB{told}"


@with_schedule_options
def fit(
    source: ModelSource = None,
    schedule: Annotated[str, typer.Option(help=CATALOGUE)] = "one_f_one_b",
    devices: Annotated[int | None, DEVICES] = None,
    microbatches: Microbatches = 8,
    memory: Annotated[float | None, MEMORY] = None,
    box: BoxProfile = None,
    optimizer: Annotated[str, OPTIMIZER] = "AdamW",
    recompute: RecomputeLevel = "ops",
    *,
    options: Given,
) -> None:
    """Estimate what each device holds; exit with 1 if it does not fit.

    FUNCTION is called under torch.device('meta'): weights and data take no memory.
    """
    with bad_input():
        require_named(schedule)
        require_owned([schedule], options)
        require_source(source)
        room = _room(devices, memory, box)
        import torch
        from rich.console import Console

        from ..sizes.changes import NOT_ENOUGH, PlannedStep, changes
        from ..sizes.step_model import StepModel

        with torch.device("meta"):
            workload = workload_of(source)(len(room.memory))
        of = StepModel(
            workload.model,
            len(room.memory),
            workload.loss_fn,
            _optimizer(optimizer),
            schedule,
            options=of_schedule(schedule, options),
        )
        level = None if recompute == "ops" else recompute
        step = PlannedStep(workload.inputs, workload.target, microbatches, level, of)
        with _without_looks(), Console(stderr=True).status("The model runs without values."):
            found = step.estimate()
            fits = found.fits(room.memory)
            tried = () if fits else changes(step)
            change = next((one for one in tried if one[1].fits(room.memory)), None)
    typer.echo(f"The memory with {microbatches} microbatches:\n{found}")
    typer.echo(f"It {'fits' if fits else 'does not fit'} in {room}: {_most(found)}.")
    if fits:
        return
    typer.echo(NOT_ENOUGH if change is None else f"It fits with {change[0]}: {_most(change[1])}.")
    raise typer.Exit(1)


@contextmanager
def _without_looks() -> Iterator[None]:
    """Refuses models that look at values, which are not there, and names the line."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    from ..rehearse.lines import line_of_error

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _refusal(str(error.func), line_of_error(error)) from error
    except (RuntimeError, TypeError) as error:
        # For these torch has no exceptions of their own, and names what was called.
        named = next((name for name in (".numpy()", "__format__") if name in str(error)), None)
        if named is None:
            raise
        raise _refusal(named, line_of_error(error)) from error


def _refusal(looked: str, line: "Line | None") -> ValueError:
    where = "" if line is None else f" at {line}"
    return ValueError(
        f"the model must not look at values, got {looked}{where}. "
        "Call pykern.estimate with with_values=True, weights and data"
    )


def _room(devices: int | None, memory: float | None, box: str | None) -> Room:
    """The memory by --memory for each of --devices, or that of a box."""
    from ..boxes import load
    from ..boxes.box import known

    if box is None:
        num_bytes = (MEMORY_GIB if memory is None else memory) * GIB
        return Room((num_bytes,) * (devices or NUM_DEVICES), None)
    if memory is not None:
        raise ValueError(
            f"--memory must not go with --box, which tells the memory of devices, got {memory:g}. "
            "Omit it"
        )
    profile = load(box)
    count = len(profile.devices) if devices is None else devices
    profile.require_devices(count)
    held = [
        known(device.memory_bytes, f"devices[{number}].memory_bytes")
        for number, device in enumerate(profile.devices[:count])
    ]
    return Room(tuple(held), profile)


def _most(found: "Estimate") -> str:
    return f"the most is {max(device.total for device in found.devices) / GIB:.4g} GiB"


def _optimizer(name: str) -> Any:
    """A function that makes optimizers of this class of torch.optim; None for "none"."""
    import torch

    if name == "none":
        return None
    made: Any = getattr(torch.optim, name, None)
    is_optimizer = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    if not is_optimizer or name == "Optimizer":
        raise ValueError(
            f"--optimizer must be a class of torch.optim or none, got '{name}'. For example AdamW"
        )
    return lambda parameters: made(parameters, lr=1e-3)

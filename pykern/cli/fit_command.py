"""`pykern fit`: whether a training step fits the memory of its devices, before there are any."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..schedules import require_named
from .errors import bad_input
from .schedule_options import Given, of_schedule, require_owned, with_schedule_options
from .sources import CATALOGUE
from .values import number_option
from .workloads import workload_of

if TYPE_CHECKING:
    from ..sizes import Estimate

GIB = 2**30


@with_schedule_options
def fit(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (model, inputs, target) or (model, inputs, target, loss_fn) of a batch. "
            "It is called under torch.device('meta'): weights and data take no memory.",
            show_default="a small GPT",
        ),
    ] = None,
    schedule: Annotated[str, typer.Option(help=CATALOGUE)] = "one_f_one_b",
    devices: Annotated[int, number_option(about="Devices, one for each stage or more.")] = 8,
    microbatches: Annotated[int, number_option(about="Parts of each batch.")] = 8,
    memory: Annotated[float, typer.Option(min=0, help="Memory of each device, in GiB.")] = 80.0,
    optimizer: Annotated[
        str, typer.Option(help="A class of torch.optim, or none to leave its state out.")
    ] = "AdamW",
    recompute: Annotated[
        Literal["none", "ops", "layer", "stage"],
        typer.Option(help="Level, as for Pipeline: values that a forward keeps for its backward."),
    ] = "ops",
    *,
    options: Given,
) -> None:
    """Estimate what each device holds; exit with 1 if it does not fit."""
    with bad_input():
        require_named(schedule)
        require_owned([schedule], options)
        import torch
        from rich.console import Console

        from ..sizes.changes import PlannedStep, changes

        with torch.device("meta"):
            workload = workload_of(source)(devices)
        arguments = {
            "model": workload.model,
            "loss_fn": workload.loss_fn,
            "devices": devices,
            "schedule": schedule,
            "optimizer": _optimizer(optimizer),
            **of_schedule(schedule, options),
        }
        level = None if recompute == "ops" else recompute
        step = PlannedStep(workload.inputs, workload.target, microbatches, level, arguments)
        with Console(stderr=True).status("The model runs without values."):
            found = step.estimate()
            fits = found.fits(memory * GIB)
            tried = () if fits else changes(step)
            change = next((one for one in tried if one.estimate.fits(memory * GIB)), None)
    typer.echo(f"GiB of each device, with {microbatches} microbatches:\n{found}")
    typer.echo(f"It {'fits' if fits else 'does not fit'} in {memory:g} GiB: {_most(found)}.")
    if fits:
        return
    typer.echo(
        "Neither more microbatches, nor the optimizer on the host, nor recompute saves enough. "
        "Take more devices."
        if change is None
        else f"It fits with {change.name}: {_most(change.estimate)}."
    )
    raise typer.Exit(1)


def _most(found: "Estimate") -> str:
    return f"the most is {max(device.total for device in found.devices) / GIB:.3f} GiB"


def _optimizer(name: str) -> Any:
    """A function that makes optimizers of this class of torch.optim; None for "none"."""
    import torch

    if name == "none":
        return None
    made: Any = getattr(torch.optim, name, None)
    is_optimizer = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    if not is_optimizer:
        raise ValueError(
            f"--optimizer must be a class of torch.optim or none, got '{name}'. For example AdamW"
        )
    return lambda parameters: made(parameters, lr=0.0)

"""`pykern tune`: the fastest pipeline of a model on this machine, measured."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..boxes import load
from .errors import bad_input
from .reports import print_and_save, require_files
from .values import BoxProfile, DeviceNames, amount_option, number_option
from .workloads import ModelSource, workload_of

GIB = 2**30


def tune(
    source: ModelSource = None,
    devices: DeviceNames = "cpu:2",
    batch_size: Annotated[
        int | None, number_option(about="Rows of a batch.", show_default="those returned")
    ] = None,
    memory: Annotated[
        float | None,
        amount_option(least=0, about="Memory of each device, in GiB.", show_default="that of GPUs"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A file for Pipeline(model, tuned=...).", show_default="none"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="A file that keeps the measurements.", show_default="none"),
    ] = None,
    box: BoxProfile = None,
) -> None:
    """Measure a model, search by simulation, run the best six, and print them with others.

    With --box, the plans are for that box, whose devices are like those measured. None is run.
    """
    with bad_input():
        require_files(out=out, resume=resume)
        profile = None if box is None else load(box)
        make = workload_of(source)
        from ..runtime.devices import parse_devices
        from ..tuning import TuneInterrupted
        from ..tuning import tune as tuned

        at_least = len(parse_devices(devices) if profile is None else profile.devices)
        code, workload = 0, make(at_least)
        try:
            choice = tuned(
                workload.model,
                sample=workload.inputs,
                target=workload.target,
                loss_fn=workload.loss_fn,
                devices=devices,
                batch_size=batch_size,
                memory=None if memory is None else memory * GIB,
                resume=resume,
                box=profile,
            )
        except TuneInterrupted as interrupt:
            code, choice = 130, interrupt.choice
    print_and_save(partial(typer.echo, str(choice)), (out, choice.save))
    raise typer.Exit(code)

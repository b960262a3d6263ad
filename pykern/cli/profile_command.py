"""`pykern profile`: why the steps of a model take their time."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schedules import require_named
from ..script import require_script
from .errors import bad_input, errors_of
from .reports import HtmlFile, PictureFile, TraceFile, require_files, show
from .schedule_options import Given, require_owned, with_schedule_options
from .sources import TRAINED, require_backwards
from .values import BoxProfile, DeviceNames, Microbatches, ScriptArguments, number_option
from .workloads import Workload, workload_of

if TYPE_CHECKING:
    from ..pipeline.pipeline import Pipeline
    from ..profiling import Report

# The script makes its own pipeline.
_OF_MODELS = ("schedule", "devices", "microbatches")


@with_schedule_options
def profile(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:FUNCTION|SCRIPT",
            help="Returns (model, inputs, target) or (model, inputs, target, loss_fn) of a batch; "
            "or a training script with a pykern.Pipeline.",
            show_default="a small GPT",
        ),
    ] = None,
    arguments: ScriptArguments = None,
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED)}.")] = "one_f_one_b",
    devices: DeviceNames = "cpu:2",
    microbatches: Microbatches = 4,
    steps: Annotated[int, number_option(about="Steps, besides two that warm up.")] = 5,
    nsys: Annotated[
        Path | None,
        typer.Option(
            help="Record the whole script with Nsight Systems into this .nsys-rep, for at most 60 "
            "seconds, and print the profile of its steps, as pykern nsys does.",
            show_default="none",
        ),
    ] = None,
    box: BoxProfile = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
    *,
    options: Given,
) -> None:
    """Run some steps, and print why they take their time and what would shorten them.

    A script runs to the second step of its first pipeline, which is profiled, and is ended.
    """
    with bad_input():
        require_files(nsys=nsys, html=html, trace=trace, picture=picture)
        from ..boxes import load

        rates = None if box is None else load(box)
        if source is not None and source.endswith(".py"):
            given = [name for name in _OF_MODELS if _is_given(context, name)]
            _refuse_of_models([*given, *options])
            require_script(source)
            run = partial(_of_script, source, arguments or [], steps, nsys)
        else:
            _refuse_of_scripts(source, arguments, nsys)
            more = {"schedule": schedule, "devices": devices, "microbatches": microbatches}
            run = partial(_of_model, *_made(source, options, more), steps)
    report = run()
    with bad_input():
        report = report if rates is None else report.on_box(rates)
    show(report, html, trace, picture)


def _is_given(context: typer.Context, name: str) -> bool:
    of = context.get_parameter_source(name)
    return of is not None and of.name == "COMMANDLINE"


def _refuse_of_models(given: Sequence[str]) -> None:
    if given:
        raise ValueError(
            f"--{given[0]} must stand behind -- for a script, which makes its own pipeline, got it "
            "before. Move it there, if the script has it"
        )


def _refuse_of_scripts(source: str | None, arguments: Sequence[str] | None, nsys: object) -> None:
    unknown = [one for one in [source or "", *(arguments or [])] if one.startswith("-")]
    if unknown or arguments:
        raise ValueError(
            "a model must be given without arguments, got "
            f"{(unknown or arguments or [''])[0]}. See pykern profile --help"
        )
    if nsys is not None:
        raise ValueError(
            f"--nsys must be given with a script, got {source or 'no script'}. Name one, train.py"
        )


def _of_script(script: str, arguments: list[str], steps: int, nsys: Path | None) -> "Report":
    with bad_input(), errors_of(script):
        if nsys is not None:
            from ..nsight import read, record

            record(nsys, [script, *arguments])
            return read(nsys)
        from ..pipeline.profiled_script import profile_script

        return profile_script(script, arguments, steps)


def _of_model(pipe: "Pipeline", workload: Workload, steps: int) -> "Report":
    from ..partition.chain import call_of

    args, kwargs = call_of(workload.inputs)
    with pipe:
        return pipe.profile(*args, target=workload.target, steps=steps, **kwargs)


def _made(source: str | None, options: Given, more: dict[str, Any]) -> "tuple[Pipeline, Workload]":
    """The pipeline of a model, and its batch."""
    require_named(more["schedule"])
    require_owned([more["schedule"]], options)
    make = workload_of(source)
    from ..pipeline.pipeline import Pipeline
    from ..runtime.devices import parse_devices

    workload = make(len(parse_devices(more["devices"])))
    sample = workload.sample(more["microbatches"])
    given = {**more, **options, "loss_fn": workload.loss_fn, "sample": sample}
    pipe = Pipeline(workload.model, **given)
    require_backwards(more["schedule"], pipe.plan, "A profile is of training steps")
    return pipe, workload

"""`pykern profile`: why the steps of a model take their time."""

from typing import Annotated, Any

import typer

from ..schedules import require_named
from .errors import bad_input
from .reports import HtmlFile, PictureFile, TraceFile, require_files, show
from .schedule_options import Given, require_owned, with_schedule_options
from .sources import TRAINED
from .values import DeviceNames, Microbatches, number_option
from .workloads import ModelSource, workload_of


@with_schedule_options
def profile(
    source: ModelSource = None,
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED)}.")] = "one_f_one_b",
    devices: DeviceNames = "cpu:2",
    microbatches: Microbatches = 4,
    steps: Annotated[int, number_option(about="Steps, besides two that warm up.")] = 5,
    html: HtmlFile = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
    *,
    options: Given,
) -> None:
    """Run some steps, and print why they take their time and what would shorten them."""
    with bad_input():
        require_files(html=html, trace=trace, picture=picture)
        require_named(schedule)
        require_owned([schedule], options)
        from ..partition.chain import call_of
        from ..pipeline.pipeline import Pipeline
        from ..runtime.devices import parse_devices

        more: dict[str, Any] = dict(options)
        workload = workload_of(source)(len(parse_devices(devices)))
        pipe = Pipeline(
            workload.model,
            devices=devices,
            schedule=schedule,
            microbatches=microbatches,
            loss_fn=workload.loss_fn,
            sample=workload.sample(microbatches),
            **more,
        )
    args, kwargs = call_of(workload.inputs)
    with pipe:
        report = pipe.profile(*args, target=workload.target, steps=steps, **kwargs)
    show(report, html, trace, picture)

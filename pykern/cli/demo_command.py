"""`pykern demo`: trains a small model."""

from pathlib import Path
from typing import Annotated

import typer

from ..demo.files import make_folder, require_text_file, require_usable
from ..schedules import require_named
from .errors import bad_files, bad_input
from .schedule_options import Given, require_owned, with_schedule_options
from .sources import TRAINED, require_backwards, scheduled
from .values import DeviceNames, Microbatches, number_option


@with_schedule_options
def demo(
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED)}.")] = "hanayo",
    devices: DeviceNames = "cpu:4",
    microbatches: Microbatches = 8,
    steps: Annotated[int, number_option(about="Optimizer steps.")] = 400,
    data: Annotated[
        Path | None, typer.Option(help="Text to train on.", show_default="Python's own source")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is kept.")] = Path("pykern-demo"),
    *,
    options: Given,
) -> None:
    """Train a small GPT by a pipeline, and compare the run with its prediction."""
    with bad_input():
        require_named(schedule)
        require_owned([schedule], options)
        if data is not None:
            require_text_file(data)
        require_usable(out)
        from rich.console import Console

        from ..demo.run import DemoSettings, run
        from ..demo.text import standard_library, text_file
        from ..pipeline.choose_plan import require_runnable
        from ..runtime.devices import parse_devices

        plan = scheduled(schedule, len(parse_devices(devices)), microbatches, options)
        require_runnable(plan)
        require_backwards(schedule, plan, "The demo trains")
        settings = DemoSettings(steps=steps)
        corpus = text_file(data, settings.window) if data else standard_library(settings.window)
        make_folder(out)
    with bad_files():
        run(plan, devices, corpus, out, Console(highlight=False), settings)

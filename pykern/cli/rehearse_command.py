"""`pykern rehearse`: a training script, run unchanged on a box that is not there."""

from pathlib import Path
from typing import Annotated

import typer

from ..boxes import load
from ..script import require_script
from .errors import bad_input, errors_of
from .reports import HtmlFile, PictureFile, TraceFile, require_files, show
from .values import ScriptArguments, number_option


def rehearse(
    script: Annotated[Path, typer.Argument(help="A training script with a pykern.Pipeline.")],
    box: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME", help="A box as for pykern topo, or 4x4090: four such GPUs."
        ),
    ],
    arguments: ScriptArguments = None,
    steps: Annotated[int, number_option(about="Steps, after which the script is ended.")] = 3,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write all of it here.", show_default="none")
    ] = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
) -> None:
    """Run a training script for GPUs on a machine without any.

    CPU workers compute its steps. Bytes and times are predicted for the box, and the orders that
    its GPUs would get are checked by the model of a driver. Exit with 1 if a step does not fit, an
    order is wrong, or the script fails.
    """
    with bad_input():
        require_files(json=json, html=html, trace=trace, picture=picture)
        require_script(str(script))
        profile = load(box)
        from ..rehearse.run import rehearse as run

        with errors_of(str(script)):
            found = run(str(script), arguments or [], profile, steps)
    if not found.passes and not found.timelines():
        # The summary says why there are no times; the verdict is the exit status.
        trace = picture = None
    show(found, html, trace, picture, (json, found.save))
    if not found.passes:
        raise typer.Exit(1)

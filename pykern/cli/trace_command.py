"""`pykern trace`: why the steps that torch.profiler has recorded took their time."""

from pathlib import Path
from typing import Annotated

import typer

from .errors import bad_input
from .reports import HtmlFile, PictureFile, TraceFile, require_files, show


def trace(
    recording: Annotated[
        Path,
        typer.Argument(
            help="A trace by export_chrome_trace, .json or .json.gz.", metavar="RECORDING"
        ),
    ],
    html: HtmlFile = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
) -> None:
    """Read a trace of torch.profiler back: why its steps took their time."""
    with bad_input():
        require_files(html=html, trace=trace, picture=picture)
        from ..kineto import read

        found = read(recording)
    show(found, html, trace, picture)

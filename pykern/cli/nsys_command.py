"""`pykern nsys`: why the steps that Nsight Systems has recorded took their time."""

from pathlib import Path
from typing import Annotated

import typer

from .errors import bad_input
from .reports import HtmlFile, PictureFile, TraceFile, require_files, show
from .values import number_option


def nsys(
    report: Annotated[
        Path, typer.Argument(help="A .nsys-rep report (needs nsys), or its .sqlite export.")
    ],
    script: Annotated[
        list[str] | None,
        typer.Argument(help="Record this script and its arguments to REPORT first."),
    ] = None,
    seconds: Annotated[int, number_option(about="When to end the script.")] = 60,
    html: HtmlFile = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
) -> None:
    """Read a report of Nsight Systems back: why its steps took their time.

    Options stand before REPORT, so that the script gets those after it.
    """
    with bad_input():
        require_files(html=html, trace=trace, picture=picture)
        from ..nsight import read, record

        if script:
            record(report, script, seconds)
        found = read(report)
    show(found, html, trace, picture)

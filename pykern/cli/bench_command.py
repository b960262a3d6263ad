"""`pykern bench`: measure a box into a file, compare two files, and make pages of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..columns import in_columns
from .errors import BadInput, bad_input
from .reports import require_files
from .values import DeviceNames, amount_option

if TYPE_CHECKING:
    from ..benchmark import BoxResults, Comparison

bench = typer.Typer(help="Measure a box into a file; compare such files, and show them.")


@bench.command()
def box(
    out: Annotated[Path, typer.Option(help="The file of the results.")] = Path("box.json"),
    devices: DeviceNames = "cpu:2",
    seconds: Annotated[float, amount_option(least=1, about="When to begin nothing more.")] = 240,
) -> None:
    """Measure copies, dispatch, schedules, recompute, inference and rivals on some devices.

    The file has versions, processors, GPUs and times, and nothing else; nothing is sent.
    """
    with bad_input():
        require_files(out=out)
        from ..benchmark import run
        from ..tuning.progress import told

        with told("measuring") as tell:
            results = run(devices, seconds, lambda _, share: tell(share), _tell_of_failure)
        try:
            results.save(out)
        finally:
            typer.echo(_shown(results))
    typer.echo(f"wrote {out}, which holds the above and each single time. Nothing is sent")


def _tell_of_failure(section: str, error: Exception) -> None:
    typer.echo(f"{section} failed: {type(error).__name__}: {error}", err=True)


@bench.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A file of pykern bench box.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Say of each figure of both files whether the second is faster.

    FASTER and SLOWER: the middle 60 % of the times do not overlap; SAME: the medians are within
    2 %; AMBIGUOUS: neither.
    """
    with bad_input():
        from ..benchmark import compare as compared
        from ..benchmark import load

        one, other = load(before), load(after)
    for name in sorted(one.machine.keys() | other.machine.keys()):
        values = [of.machine.get(name, "not told") for of in (one, other)]
        if values[0] != values[1]:
            typer.echo(f"{name}: {values[0]} | {values[1]}")
    rows = compared(one, other)
    if not rows:
        raise BadInput("the files must have a figure in common, got none")
    typer.echo(_compared(rows))


@bench.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Files of pykern bench box.")],
    picture: Annotated[
        Path | None, typer.Option(help="A picture of bars: .svg, .png or .pdf.")
    ] = None,
) -> None:
    """Print a page in Markdown of one or more files, with a column for each.

    A cell has the median, the middle 60 % of the times, and the time by simulation.
    """
    with bad_input():
        from ..benchmark import load
        from ..benchmark.report import MOST_BOXES, as_markdown, picture_of_boxes
        from ..plan.drawing.picture import write_picture

        require_files(picture=picture)
        if len(files) > MOST_BOXES:
            raise BadInput(f"FILES must be at most {MOST_BOXES}, got {len(files)}. Show some")
        names = [file.stem for file in files]
        if len(set(names)) < len(names):
            raise BadInput(f"names of FILES must differ, got {names}. Rename one")
        boxes = [(name, load(file)) for name, file in zip(names, files, strict=True)]
        if picture is not None:
            write_picture(picture_of_boxes(boxes), picture)
    typer.echo(as_markdown(boxes), nl=False)


def _shown(results: "BoxResults") -> str:
    rows = [("figure", "median", "20 %", "80 %", "predicted", "unit")]
    for figure in results.figures:
        low, high = figure.interval
        predicted = "" if figure.predicted is None else f"{figure.predicted:.3f}"
        median, least, most = (f"{one:.3f}" for one in (figure.median, low, high))
        rows.append((figure.name, median, least, most, predicted, figure.unit))
    machine = [f"{name}: {value}" for name, value in results.machine.items()]
    left_out = [f"{name} left out: {why}" for name, why in results.left_out.items()]
    return "\n".join([*machine, in_columns(rows, left=0), *left_out])


def _compared(rows: "list[Comparison]") -> str:
    table = [("figure", "before", "after", "unit", "ratio", "verdict")]
    for row in rows:
        before, after = (f"{one:.3f}" for one in (row.before, row.after))
        ratio = f"{row.after / row.before:.3f}"
        table.append((row.name, before, after, row.unit, ratio, row.verdict))
    return in_columns(table, left=0)

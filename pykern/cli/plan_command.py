"""`pykern plan`: draws plans, compares them, and keeps them in files."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..plan import save_plan, simulate
from ..plan.files import write_text
from .errors import bad_input
from .frozen import with_frozen
from .memory import peaks_in_words
from .recompute import recomputed, without_in_words
from .schedule_options import Given, with_schedule_options
from .search import Search
from .sources import (
    CATALOGUE,
    NUM_DEVICES,
    NUM_MICROBATCHES,
    Costed,
    Counts,
    PlanSource,
    sources_of,
)
from .transfers import Transfers, transfers_of
from .values import (
    BUDGET,
    COSTS,
    FROZEN,
    MEMORY,
    MESSAGE,
    RECOMPUTE,
    TRANSFER,
    BoxProfile,
    ShareCosts,
    Stages,
    number_option,
    share_costs,
)

if TYPE_CHECKING:
    from ..plan import Costs, Timeline

DEFAULT_COSTS = "1:2"
# More columns than any terminal has.
WIDEST = 1e6

# The forms by the ends of file names, the longer ends before the shorter.
FORMS = {
    ".trace.json": "a Chrome trace",
    ".json": "the plan",
    ".comms.csv": "the plan for torch's runtime, with sends and receives",
    ".csv": "the plan for torch's runtime",
    ".txt": "its table",
    ".png": "a picture",
    ".pdf": "a picture",
    ".svg": "a picture",
}
DRAWN = (".trace.json", ".png", ".pdf", ".svg")

DEVICES = number_option(
    "-p",
    "--devices",
    about=f"Number of devices; if not given those of --box, or {NUM_DEVICES}.",
)
MICROBATCHES = number_option(
    "-m", "--microbatches", about=f"Number of microbatches; {NUM_MICROBATCHES} if not given."
)
REPLICAS = number_option(
    "--replicas",
    about="Replicas of the model side by side, which share out devices and microbatches; the "
    "schedule, or file, is for one of them. 1 if not given.",
)

OUT = typer.Option(
    help="File to write: " + ", ".join(f"{end} ({what})" for end, what in FORMS.items())
)


@with_schedule_options
def plan(
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help=f"{CATALOGUE} Or auto, the best that a search finds. Or a plan's .json or .csv.",
        ),
    ],
    devices: Annotated[int | None, DEVICES] = None,
    microbatches: Annotated[int | None, MICROBATCHES] = None,
    replicas: Annotated[int | None, REPLICAS] = None,
    costs: Annotated[ShareCosts | None, COSTS] = None,
    transfer: Annotated[float | None, TRANSFER] = None,
    box: BoxProfile = None,
    message: Annotated[float | None, MESSAGE] = None,
    memory: Annotated[float | None, MEMORY] = None,
    budget: Annotated[float | None, BUDGET] = None,
    recompute: Annotated[Stages | None, RECOMPUTE] = None,
    frozen: Annotated[Stages | None, FROZEN] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="A second plan, drawn on the same time axis."),
    ] = None,
    out: Annotated[Path | None, OUT] = None,
    *,
    options: Given,
) -> None:
    """Draw a schedule or a plan from a file, with makespan, bubble ratio and peak memory.

    A microbatch takes 1 ms forward and 2 ms backward over a device's share, if not said otherwise.
    With --box and --message, transfers take the time of the box's links.
    """
    with bad_input():
        from rich.console import Console
        from rich.text import Text

        from ..plan.drawing import as_text

        names = [schedule] if compare is None else [schedule, compare]
        if len(set(names)) < len(names):
            raise ValueError(f"--compare must be another plan, got {schedule} twice")
        transfers = transfers_of(transfer, box, message)
        counts = Counts(devices, microbatches, replicas or 1, transfers.num_devices or NUM_DEVICES)
        share = (costs or share_costs(DEFAULT_COSTS)).times(counts.replicas)
        search = Search(share, transfers, memory, budget)
        search.require_used(names, recomputes=recompute is not None)
        sources = sources_of(names, counts, options, search)
        drawn = [Costed(s, costs_for(s, costs, transfers, len(sources))) for s in sources]
        if frozen is not None:
            drawn = [with_frozen(each, frozen) for each in drawn]
        if recompute is not None:
            drawn = [recomputed(each, recompute, memory) for each in drawn]
        timelines = {each.source.label: simulate(each.source.plan, each.costs) for each in drawn}
        if out is not None:
            save(out, [each.source for each in drawn], timelines)
    console = Console(highlight=False)
    console.print(as_text(timelines, console.width))
    more = transfers.in_words([each.costs for each in drawn])
    for line in [*where_numbers_fit(timelines, console.width), *lines_below(drawn), *more]:
        console.print(Text(line))
    for part in search.report(is_drawn=frozen is None and recompute is None):
        console.print(Text(part), soft_wrap=True)
    if out is not None:
        console.print(Text(f"written: {out}"), soft_wrap=True)


def lines_below(drawn: list[Costed]) -> Iterator[str]:
    """The lines below the drawing about each plan."""
    for source, costs, former in drawn:
        start = f"{source.label}: " if len(drawn) > 1 else ""
        yield start + peaks_in_words(source.plan)
        if former is not None:
            yield start + without_in_words(former, costs)


def costs_for(
    source: PlanSource, costs: ShareCosts | None, transfers: Transfers, num_sources: int
) -> "Costs":
    """The costs of the command line, else those of the file; refused if a comparison misleads."""
    if source.costs is None or costs is not None or transfers.latency_ms is not None:
        return transfers.of(costs or share_costs(DEFAULT_COSTS), source.plan)
    if num_sources > 1:
        raise ValueError(
            "--costs must be given to compare with a file that has costs of its own, got "
            f"{source.label} without it"
        )
    return transfers.over_box(source.costs, source.plan)


def where_numbers_fit(timelines: dict[str, "Timeline"], width: int) -> list[str]:
    """A line for a terminal that is too narrow for the numbers of microbatches."""
    from ..plan.drawing.terminal import fitting_width

    wanted = fitting_width(timelines, width)
    if wanted <= width:
        return []
    where = f"from {ceil(wanted)} columns on" if wanted < WIDEST else "no terminal"
    return [f"microbatches fit {where}; --out plan.svg draws a picture"]


def save(out: Path, sources: list[PlanSource], drawn: dict[str, "Timeline"]) -> None:
    """Write the drawing or the plan, as the file's name asks for."""
    from ..plan.drawing import save_chrome_trace, save_picture
    from ..replacing import require_folder

    require_folder("--out", out)
    form = next((end for end in FORMS if out.name.lower().endswith(end)), None)
    if form is None:
        raise ValueError(f"--out must end in {', '.join(FORMS)}, got {out}")
    if len(sources) > 1 and form not in DRAWN:
        raise ValueError(
            f"--out must be a drawing beside --compare, got {out}, which holds one plan"
        )
    if form == ".trace.json":
        save_chrome_trace(drawn, out)
    elif form in DRAWN:
        save_picture(drawn, out)
    elif form == ".txt":
        write_text(out, f"{sources[0].plan}\n")
    else:
        # With the costs that its file had.
        costs = sources[0].costs if form == ".json" else None
        save_plan(sources[0].plan, out, costs=costs, transfers=form == ".comms.csv")

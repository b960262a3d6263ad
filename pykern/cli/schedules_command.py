"""`pykern schedules`: the catalogue as a table."""

from typing import Annotated

from .catalogue import HEADINGS, entries, figures
from .values import COSTS, TRANSFER, ShareCosts, number_option

NOTE = (
    "Makespan in ms; the span bubble is over the longest device's time from its first to its last "
    "action, as the zero-bubble papers count; peak memory of the fullest device, in activations of "
    "a microbatch over a device's share; messages between devices, for each microbatch. Options "
    "are left as they are."
)


def schedules(
    devices: Annotated[int, number_option("-p", "--devices", about="Number of devices.")] = 4,
    microbatches: Annotated[
        int, number_option("-m", "--microbatches", about="Number of microbatches.")
    ] = 8,
    costs: Annotated[ShareCosts, COSTS] = "1:2",  # type: ignore[assignment]  # parsed by typer
    transfer: Annotated[float, TRANSFER] = 0.0,
) -> None:
    """Compare all schedules of the catalogue: bubble, memory and messages for your counts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left", no_wrap=place == 0)
    refused = []
    for name, planned in entries(devices, microbatches, costs, transfer):
        if isinstance(planned, str):
            refused.append(f"{name}: {planned}")
        else:
            table.add_row(name, *figures(*planned))
    console = Console(highlight=False)
    console.print(table)
    console.print(Text("\n".join([NOTE, *refused])))

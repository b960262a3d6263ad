"""`pykern schedules`: the catalogue as a table."""

from typing import Annotated

from .catalogue import HEADINGS, entries, figures
from .errors import bad_input
from .reports import print_table
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
    rows, below = [], [NOTE]
    with bad_input():
        for name, planned in entries(devices, microbatches, costs, transfer):
            if isinstance(planned, str):
                below.append(f"{name}: {planned}")
            else:
                rows.append([name, *figures(*planned)])
    print_table(HEADINGS, rows, below, words=["schedule"], whole=["schedule"])

"""The command line: `pykern demo` and `pykern plan`.

It reads and refuses options; the work is done by what it calls, imported only when it is needed.
"""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__

if TYPE_CHECKING:
    from .plan import Plan

NEXT_STEPS = """\
pykern trains a PyTorch model as a pipeline, in one process. Four next steps:

  pykern demo                                train a small GPT on four CPU workers, a minute
  pykern plan hanayo -p 4 -m 8 --waves 2     draw a schedule in the terminal
  pykern plan one_f_one_b --out plan.svg     draw one to a picture
  pykern --help                              every command and option"""

# The command line's names of the schedules' own options.
FLAGS = {"waves": "--waves", "num_chunks": "--chunks"}


class BadInput(typer.TyperException):
    """What the user gave cannot be used; the message says why."""

    exit_code = 2


class OneLineErrors(TyperGroup):
    """A group whose errors are one line on stderr, whoever found them."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line and exit."""
        extra["standalone_mode"] = False
        # A terminal or pipe that knows few characters shows "?" for the others.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            sys.exit(super().main(*args, **extra))
        except typer.TyperException as error:
            message = " ".join(error.format_message().split())
            typer.echo(f"pykern: {message}", err=True)
            sys.exit(error.exit_code)


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


@contextmanager
def _bad_input() -> Iterator[None]:
    """Turn what preparations refuse into one line for the user."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise BadInput(str(error)) from error


def _scheduled(name: str, num_devices: int, num_microbatches: int, **options: int | None) -> Plan:
    """The plan of a schedule of the catalogue, refusing options that it does not have."""
    from .schedules import by_name

    if name not in by_name:
        raise ValueError(f"schedule '{name}' is unknown; there are {', '.join(by_name)}")
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        owners = [n for n, rule in by_name.items() if option in inspect.signature(rule).parameters]
        if name not in owners:
            raise ValueError(
                f"{name} has no {FLAGS[option]}; it is an option of {', '.join(owners)}"
            )
    return by_name[name](num_devices, num_microbatches, **given)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pykern {__version__}")
        raise typer.Exit


Waves = Annotated[
    int | None, typer.Option(help="Times that hanayo runs down the devices and back up.")
]
Chunks = Annotated[int | None, typer.Option(help="Stages per device, for interleaved.")]


@app.callback(epilog="Example: pykern plan hanayo -p 4 -m 8 --waves 2")
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Pipeline parallelism for PyTorch in one process."""
    if context.invoked_subcommand is None:
        typer.echo(NEXT_STEPS)


@app.command(epilog="Example: pykern demo --schedule interleaved --chunks 2 --steps 100")
def demo(
    schedule: Annotated[str, typer.Option(help="A schedule of the catalogue.")] = "hanayo",
    devices: Annotated[str, typer.Option(help='Workers: "cpu:4" is four.')] = "cpu:4",
    microbatches: Annotated[int, typer.Option(help="Parts of each batch.")] = 8,
    waves: Waves = None,
    chunks: Chunks = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400,
    data: Annotated[
        Path | None, typer.Option(help="Text to train on.", show_default="Python's own source")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is kept.")] = Path("pykern-demo"),
) -> None:
    """Train a small GPT by a pipeline of CPU workers, and compare the run with its prediction."""
    with _bad_input():
        from rich.console import Console

        from .demo.report import make_folder
        from .demo.run import Size, run
        from .demo.text import standard_library, text_file
        from .devices import parse_devices

        num_devices = len(parse_devices(devices))
        plan = _scheduled(schedule, num_devices, microbatches, waves=waves, num_chunks=chunks)
        window = Size().window
        corpus = standard_library(window) if data is None else text_file(data, window)
        make_folder(out)
    run(plan, devices, corpus, out, steps, Console(highlight=False))


@app.command(epilog="Example: pykern plan hanayo -p 4 -m 8 --waves 2 --out hanayo.svg")
def plan(
    schedule: Annotated[str, typer.Argument(metavar="NAME", help="A schedule of the catalogue.")],
    devices: Annotated[int, typer.Option("-p", "--devices", help="Number of devices.")] = 4,
    microbatches: Annotated[
        int, typer.Option("-m", "--microbatches", help="Number of microbatches.")
    ] = 8,
    waves: Waves = None,
    chunks: Chunks = None,
    backward: Annotated[float, typer.Option(help="Cost of a backward, in forwards.")] = 2.0,
    transfer: Annotated[
        float, typer.Option(help="Latency of a transfer between devices, in forwards.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option(help="File to write: .png, .svg, .json (trace) or .txt.")
    ] = None,
) -> None:
    """Draw a schedule, with its makespan, bubble ratio and peak in flight.

    The unit of time is the forward of one microbatch through one device's share of the model.
    """

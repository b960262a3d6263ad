"""The command line: `pykern demo` and `pykern plan`.

It reads and refuses options; the work is done by what it calls, imported only when it is needed.
"""

from __future__ import annotations

import inspect
import io
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from . import __version__
from .plan import Costs, Plan, simulate
from .schedules import by_name

if TYPE_CHECKING:
    from .plan import Timeline
    from .search import Found

NEXT_STEPS = """\
pykern trains a PyTorch model as a pipeline, in one process. Four next steps:

  pykern demo                               train a small GPT on four CPU workers
  pykern plan hanayo -p 4 -m 8 --waves 2    draw a schedule in the terminal
  pykern plan one_f_one_b --out plan.svg    draw one to a picture
  pykern --help                             every command and option"""

# The command line's names of the schedules' own options.
FLAGS = {"waves": "--waves", "num_chunks": "--chunks"}


CATALOGUE = f"One of {', '.join(by_name)}."


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
    except (ImportError, ValueError) as error:
        raise BadInput(str(error)) from error


def _scheduled(name: str, num_devices: int, num_microbatches: int, **options: int | None) -> Plan:
    """The plan of a schedule of the catalogue, refusing options that it does not have."""
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


def _count(given: object) -> int:
    """What is given on the command line, or a default, which is a number already."""
    text = str(given)
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"'{text}' is not a whole number of at least 1")
    return int(text)


def _milliseconds(given: object) -> float:
    try:
        milliseconds = float(str(given))
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        raise typer.BadParameter(f"'{given}' is not a time of at least 0")
    return milliseconds


def _number(*names: str, about: str) -> Any:
    return typer.Option(*names, help=about, parser=_count, metavar="N")


def _time(about: str) -> Any:
    return typer.Option(help=about, parser=_milliseconds, metavar="MS")


def _positive(given: object) -> float:
    try:
        number = float(str(given))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"'{given}' is not a number above 0")
    return number


Waves = Annotated[int | None, _number(about="Times that hanayo runs down the devices and back up.")]
Chunks = Annotated[int | None, _number(about="Stages per device, for interleaved.")]


@app.callback(epilog="Example: pykern plan hanayo -p 4 -m 8 --waves 2")
def root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Pipeline parallelism for PyTorch in one process."""
    if context.invoked_subcommand is None:
        typer.echo(NEXT_STEPS)


@app.command(epilog="Example: pykern demo --schedule interleaved --chunks 2 --steps 100")
def demo(
    schedule: Annotated[str, typer.Option(help=CATALOGUE)] = "hanayo",
    devices: Annotated[str, typer.Option(help='Workers: "cpu:4" is four.')] = "cpu:4",
    microbatches: Annotated[int, _number(about="Parts of each batch.")] = 8,
    waves: Waves = None,
    chunks: Chunks = None,
    steps: Annotated[int, _number(about="Optimizer steps.")] = 400,
    data: Annotated[
        Path | None, typer.Option(help="Text to train on.", show_default="Python's own source")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for what is kept.")] = Path("pykern-demo"),
) -> None:
    """Train a small GPT by a pipeline of CPU workers, and compare the run with its prediction."""
    with _bad_input():
        from rich.console import Console

        from .demo.report import make_folder
        from .demo.run import Settings, run
        from .demo.text import standard_library, text_file
        from .devices import parse_devices

        num_devices = len(parse_devices(devices))
        plan = _scheduled(schedule, num_devices, microbatches, waves=waves, num_chunks=chunks)
        settings = Settings(steps=steps)
        corpus = text_file(data, settings.window) if data else standard_library(settings.window)
        make_folder(out)
    run(plan, devices, corpus, out, Console(highlight=False), settings)


@app.command(epilog="Example: pykern plan hanayo -p 4 -m 8 --waves 2 --out hanayo.svg")
def plan(
    schedule: Annotated[str, typer.Argument(metavar="NAME", help=f"auto, or {CATALOGUE.lower()}")],
    devices: Annotated[int, _number("-p", "--devices", about="Number of devices.")] = 4,
    microbatches: Annotated[
        int, _number("-m", "--microbatches", about="Number of microbatches.")
    ] = 8,
    waves: Waves = None,
    chunks: Chunks = None,
    backward: Annotated[float, _time("A device's backward of one microbatch, in ms.")] = 2.0,
    transfer: Annotated[float, _time("Latency of a transfer between devices, in ms.")] = 0.0,
    memory: Annotated[
        float | None,
        typer.Option(
            help="For auto: memory for activations, 1F1B's being 1.", parser=_positive, metavar="X"
        ),
    ] = None,
    budget: Annotated[
        float | None, _time("For auto: how long to search, in ms of one core; 100 if not given.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .png, .svg, .json (a trace) or .txt (the table)."),
    ] = None,
) -> None:
    """Draw a schedule of the catalogue, with its makespan, bubble ratio and peak in flight.

    "auto" searches for the best under a cap on memory, and says how good it is.
    A device's forward of one microbatch, through its whole share of the model, takes 1 ms.
    """
    with _bad_input():
        from rich.console import Console
        from rich.text import Text

        from .plan.drawing import as_text

        found = None
        limits = {"memory": memory, "budget_ms": budget}
        if schedule == "auto":
            _refuse(schedule, "schedules of the catalogue", {"--waves": waves, "--chunks": chunks})
            found = _found(devices, microbatches, _share(backward, transfer), limits)
            made = found.plan
        else:
            _refuse(schedule, "auto", {"--memory": memory, "--budget": budget})
            made = _scheduled(schedule, devices, microbatches, waves=waves, num_chunks=chunks)
        timeline = simulate(made, _costs(made, backward, transfer))
        label = f"{schedule}, {made.num_stages} stages, {microbatches} microbatches"
        if out is not None:
            _save(out, made, {label: timeline})
    console = Console(highlight=False)
    console.print(as_text({label: timeline}, console.width))
    peaks = " ".join(str(timeline.peak_in_flight(device)) for device in range(devices))
    console.print(f"peak in flight, in chunks, from device 0 on: {peaks}")
    if found is not None:
        console.print(str(found), soft_wrap=True)
    if out is not None:
        console.print(Text(f"written: {out}"), soft_wrap=True)


def _refuse(schedule: str, owner: str, options: dict[str, float | None]) -> None:
    for flag, value in options.items():
        if value is not None:
            raise ValueError(f"{schedule} has no {flag}; it is an option of {owner}")


def _found(
    num_devices: int, num_microbatches: int, costs: Costs, limits: dict[str, float | None]
) -> Found:
    from .search import auto

    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    return auto(num_devices, num_microbatches, costs=costs, **given)


def _share(backward_ms: float, transfer_ms: float) -> Costs:
    """What a device's share of the model costs, whose forward takes 1 ms."""
    return Costs(1e6, 1e6 * backward_ms, transfer_ns=1e6 * transfer_ms)


def _costs(plan: Plan, backward_ms: float, transfer_ms: float) -> Costs:
    """What each stage costs when a device's share of the model takes 1 ms forward."""
    share_ns = 1e6 * plan.num_devices / plan.num_stages
    return Costs(share_ns, backward_ms * share_ns, transfer_ns=1e6 * transfer_ms)


def _save(out: Path, plan: Plan, drawn: dict[str, Timeline]) -> None:
    """Write the plan's table or the drawing of its timeline, as the file's name asks for."""
    from .plan.drawing import save_chrome_trace, save_picture

    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder; --out needs a file in one that exists")
    match out.suffix.lower():
        case ".png" | ".svg":
            save_picture(drawn, out)
        case ".json":
            save_chrome_trace(drawn, out)
        case ".txt":
            out.write_text(f"{plan}\n", encoding="utf-8")
        case _:
            raise ValueError(f"--out is {out}; its name must end in .png, .svg, .json or .txt")


def main() -> None:
    """What the installed command `pykern` runs."""
    app()

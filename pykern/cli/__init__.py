"""The command line: one module for each command, such as `demo_command`.

The commands read and refuse options; other modules do the work and are imported only when needed.
"""

import os
from typing import Annotated

import typer

from .. import _C, __version__
from .bench_command import bench
from .demo_command import demo
from .doctor_command import doctor
from .errors import OneLineErrors
from .fit_command import fit
from .nsys_command import nsys
from .plan_command import plan
from .profile_command import profile
from .rehearse_command import rehearse
from .scale_command import scale
from .schedules_command import schedules
from .topo_command import topo
from .trace_command import trace
from .tune_command import tune
from .verify_command import verify

NEXT_STEPS = """\
pykern trains a PyTorch model as a pipeline, in one process. Five next steps:

  pykern demo                               train a small GPT on four CPU workers
  pykern schedules -p 8 -m 32               every schedule's bubble and memory in a table
  pykern plan hanayo -p 4 -m 8 --waves 2    draw a schedule in the terminal
  pykern plan one_f_one_b --out plan.svg    draw one to a picture
  pykern --help                             every command and option"""

app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        speed = "optimised" if _C.optimised else "not optimised"
        ranges = "with NVTX" if _C.nvtx_built else "without NVTX"
        typer.echo(f"pykern {__version__} (core by {_C.compiler}, {speed}, {ranges})")
        raise typer.Exit


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


app.command(epilog="Example: pykern demo --schedule interleaved --chunks 2 --steps 100")(demo)
app.command(epilog="Example: pykern plan hanayo -p 4 -m 8 --waves 2 --out hanayo.svg")(plan)
app.command(epilog="Example: pykern schedules -p 8 -m 32 --costs 1:1:1")(schedules)
app.command(epilog="Example: pykern scale --gpus 64 --layers 80 --width 8192 --zero1")(scale)
app.command(epilog="Example: pykern fit my_model:make --devices 8 --memory 80")(fit)
app.command(
    epilog="Example: pykern rehearse train.py --box 4x4090 -- --devices cuda",
    context_settings={"ignore_unknown_options": True},
)(rehearse)
app.command(epilog="Example: pykern tune my_model:make --devices cpu:2 --out plan.json")(tune)
app.command(epilog="Example: pykern verify my_model:make --schedule zb_h1 --devices cpu:4")(verify)
app.command(
    epilog="Example: pykern profile --html step.html train.py -- --devices cuda",
    context_settings={"ignore_unknown_options": True},
)(profile)
app.command(
    epilog="Example: pykern nsys --html step.html step.nsys-rep train.py",
    context_settings={"allow_interspersed_args": False},
)(nsys)
app.command(epilog="Example: pykern trace --html step.html prof.json.gz")(trace)
app.command(epilog="Example: pykern doctor")(doctor)
app.command(epilog="Example: pykern topo")(topo)
app.add_typer(bench, name="bench", epilog="Example: pykern bench box --devices cpu:2")


def main() -> None:
    """Runs the installed command `pykern`."""
    # A terminal without a size may say so; Rich would take 0 for the width, and print nothing.
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]
    app()

"""Values on the command line: counts, times and costs, and the options that take them."""

import math
from typing import Annotated, Any, Literal, NamedTuple

import typer

from ..plan import Costs, Plan
from ..plan.files.strict_json import MAX_DIGITS
from ..runtime.device_names import require_known


class ShareCosts(NamedTuple):
    """The times of one microbatch over a device's whole share of the model, in ms."""

    forward: float
    input: float
    weight: float

    def of(self, plan: Plan, transfer_ms: float) -> Costs:
        """The costs of each action, for one model and one microbatch, however they are cut."""
        part = plan.num_devices / (plan.num_stages * plan.num_slices)
        return self.times(part).of_share(transfer_ms)

    def times(self, factor: float) -> "ShareCosts":
        """The costs of a share that is `factor` times as large."""
        return ShareCosts(self.forward * factor, self.input * factor, self.weight * factor)

    def of_share(self, transfer_ms: float) -> Costs:
        """The costs of a whole share."""
        return Costs(
            1e6 * self.forward,
            1e6 * (self.input + self.weight),
            1e6 * transfer_ms,
            input_ns=1e6 * self.input,
            weight_ns=1e6 * self.weight,
        )


def count(given: object) -> int:
    """A count of at least 1; `given` is text of the command line, or a default number."""
    text = str(given)
    if not is_whole(text) or int(text) < 1:
        raise typer.BadParameter(f"the value must be a whole number of at least 1, got '{text}'")
    return int(text)


def is_whole(text: str) -> bool:
    """Whether it is the digits of a whole number; refuses more of them than Python reads."""
    if len(text) > MAX_DIGITS and text.isdecimal():
        raise typer.BadParameter(f"numbers must have at most {MAX_DIGITS} digits, got {len(text)}")
    return text.isdecimal()


def number(given: object) -> float:
    """Any number, also an infinite one or NaN."""
    try:
        return float(str(given))
    except ValueError:
        raise typer.BadParameter(f"the value must be a number, got '{given}'") from None


def amount_option(*names: str, least: int, about: str, show_default: str | bool = True) -> Any:
    """An option that takes a number from `least` on."""

    def parse(given: object) -> float:
        if not number(given) >= least:
            raise typer.BadParameter(
                f"the value must be a number of at least {least}, got '{given}'"
            )
        return number(given)

    return typer.Option(*names, help=about, parser=parse, metavar="X", show_default=show_default)


def milliseconds(given: object) -> float:
    """A finite time."""
    time = time_of(str(given))
    if math.isnan(time):
        raise typer.BadParameter(f"the value must be a time of at least 0, got '{given}'")
    return time


def positive(given: object) -> float:
    """A finite number above 0."""
    number = time_of(str(given))
    if not number > 0:
        raise typer.BadParameter(f"the value must be a number above 0, got '{given}'")
    return number


def share_costs(given: object) -> ShareCosts:
    """The costs from F:I:W, or from F:B, whose B is half for the inputs, half for the weights."""
    times = [time_of(text) for text in str(given).split(":")]
    if len(times) not in (2, 3) or any(map(math.isnan, times)):
        raise typer.BadParameter(
            f"the value must be two times F:B or three F:I:W of at least 0, got '{given}'"
        )
    if len(times) == 2:
        times[1:] = [times[1] / 2, times[1] / 2]
    return ShareCosts(*times)


def device_names(given: object) -> str:
    """A name of devices that may exist; whether they do is known to torch alone."""
    try:
        require_known(str(given))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return str(given)


class Stages(NamedTuple):
    """Numbers of stages, each once; None for all stages."""

    numbers: tuple[int, ...] | None


def stages(given: object) -> Stages:
    """The stages from "all", or from numbers with commas between them."""
    texts = str(given).split(",")
    if texts == ["all"]:
        return Stages(None)
    if not all(map(is_whole, texts)) or len(set(map(int, texts))) < len(texts):
        raise typer.BadParameter(
            f"the value must be all, or different stages such as 0,2, got '{given}'"
        )
    return Stages(tuple(map(int, texts)))


def time_of(text: str) -> float:
    """The number, or NaN if the text is not a number, or is negative or infinite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if 0 <= number < math.inf else math.nan


def number_option(*names: str, about: str, show_default: str | bool = True) -> Any:
    """An option that takes a count."""
    return typer.Option(*names, help=about, parser=count, metavar="N", show_default=show_default)


BoxProfile = Annotated[
    str | None,
    typer.Option(
        "--box",
        metavar="FILE|NAME",
        help="The profile of a box: a file of pykern topo --json, or h100x8, a100x4, rtx4090x8, "
        "rtx3090x2, or 4x4090 for four of those, whose figures are published and not measured.",
    ),
]
DeviceNames = Annotated[
    str,
    typer.Option(
        help='"cpu:2": two workers; "cuda": all GPUs.', parser=device_names, metavar="NAME"
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(
        help="The script's own. Options that this command does not have are the "
        "script's, as is everything behind --."
    ),
]
Microbatches = Annotated[int, number_option(about="Parts of each batch.")]
RecomputeLevel = Annotated[
    Literal["none", "ops", "layer", "stage"],
    typer.Option(help="Level, as for Pipeline: values that a forward keeps for its backward."),
]
COSTS: Any = typer.Option(
    "--costs",
    help="Times of a microbatch over a device's share of the model, in ms: forward and backward, "
    "or forward, input gradient and weight gradient.",
    parser=share_costs,
    metavar="F:B|F:I:W",
)
TRANSFER: Any = typer.Option(
    "--transfer",
    help="Latency of a transfer between devices, in ms.",
    parser=milliseconds,
    metavar="MS",
)
MESSAGE: Any = typer.Option(
    "--message",
    help="With --box: what a microbatch sends from one stage to the next, in MiB.",
    parser=positive,
    metavar="MIB",
)
MEMORY: Any = typer.Option(
    "--memory",
    help="For auto: memory for activations, where 1 is what 1F1B takes; 1 if not given. For "
    "--recompute: most that an early R may fill; what it takes not to lose time if not given.",
    parser=positive,
    metavar="X",
)
FROZEN: Any = typer.Option(
    "--frozen",
    help="Stages with nothing to train, such as 0,1: those in front of the first that trains have "
    "forwards alone, others hand gradients on.",
    parser=stages,
    metavar="STAGE,...",
)
RECOMPUTE: Any = typer.Option(
    "--recompute",
    help="Stages whose activations are made anew before their backward, in as long as F takes.",
    parser=stages,
    metavar="all|STAGE,...",
)
BUDGET: Any = typer.Option(
    "--budget",
    help="For auto: how long to search, in ms of one core; 100 if not given.",
    parser=milliseconds,
    metavar="MS",
)

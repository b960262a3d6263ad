"""`pykern scale`: what a step may cost on many GPUs, and how to lay it out."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..columns import counted
from ..one_of import require_one_of
from .errors import bad_input
from .reports import print_table
from .values import BoxProfile, is_whole, number, number_option

if TYPE_CHECKING:
    from ..scale import Cluster, Job, Prediction
    from ..scale.transformer import Recomputed

HEADINGS = (
    *("GPUs", "dp x tp x pp", "schedule", "step ms", "of peak", "bubble", "tensor ms", "data ms"),
    *("exposed ms", "memory GB"),
)
# These need all of their letters, also on a narrow terminal.
WHOLE = ("GPUs", "dp x tp x pp", "schedule")
NOTE = (
    "Predicted from data sheets by simulation, not measured. dp pipelines x tp shards of every "
    "stage x pp devices. 'Of peak': the model's operations, as a share. Tensor: all-reduces within "
    "stages. Data: gradients over pipelines, and what ZeRO-1 gathers. Exposed: time of these that "
    "the plan does not hide."
)
OVER_BOXES = "* a pipeline over several boxes: a process for each GPU, on torch's runtime."
MOST_GPUS = 65_536
SCHEDULES = "one_f_one_b,interleaved,zb_h1,hanayo"


def sizes(given: object) -> list[int]:
    """Numbers of GPUs, ascending, from text with commas; A..B is A and its doubles up to B."""
    numbers: set[int] = set()
    for word in str(given).split(","):
        first, dots, last = word.partition("..")
        ends = [first, last] if dots else [first]
        if not all(is_whole(end) and 0 < int(end) <= MOST_GPUS for end in ends):
            raise typer.BadParameter(
                f"the numbers must be 1 to {MOST_GPUS} such as 8,64 or 8..1024, got '{given}'"
            )
        size, most = int(first), int(ends[-1])
        if size > most:
            raise typer.BadParameter(
                f"a range must be of ascending numbers, got {word}. Write {last}..{first}."
            )
        while size <= most:
            numbers.add(size)
            size *= 2
    return sorted(numbers)


def names(given: object) -> list[str]:
    """Different names with commas between them."""
    found = str(given).split(",")
    if not all(found) or len(set(found)) < len(found):
        raise typer.BadParameter(
            f"names must be different ones with commas between them, got '{given}'. "
            "Give each schedule once."
        )
    return found


def scale(
    gpus: Annotated[
        Any,
        typer.Option(parser=sizes, metavar="N,N..N", help="Numbers of GPUs; A..B is by doubling."),
    ] = "8..1024",
    layers: Annotated[int, number_option("--layers", about="Layers of the GPT.")] = 32,
    width: Annotated[int, number_option("--width", about="Width of its activations.")] = 4096,
    sequence: Annotated[int, number_option("--sequence", about="Tokens of a row.")] = 4096,
    vocabulary: Annotated[int, number_option("--vocabulary", about="Known tokens.")] = 32_000,
    batch: Annotated[int, number_option("--batch", about="Rows of a step, over all GPUs.")] = 512,
    microbatch: Annotated[int, number_option("--microbatch", about="Rows of a microbatch.")] = 1,
    zero: Annotated[bool, typer.Option("--zero1", help="Share the optimizer's state out.")] = False,
    recompute: Annotated[
        str, typer.Option(metavar="none|scores|layer", help="Computed again in backward.")
    ] = "none",
    gpu: Annotated[
        str, typer.Option(metavar="a100|h100|h200", help="Boxes of eight; without --box.")
    ] = "h100",
    box: BoxProfile = None,
    cards: Annotated[
        int | None, number_option("--cards", about="Network cards of a box; one per GPU.")
    ] = None,
    schedule: Annotated[
        Any, typer.Option(parser=names, metavar="NAME,...", help="Names to choose from.")
    ] = SCHEDULES,
    top: Annotated[int, number_option("--top", about="Layouts shown for each number.")] = 3,
    slowdown: Annotated[
        float | None,
        typer.Option(
            "--straggler",
            parser=number,
            metavar="FACTOR",
            help="One GPU whose kernels take so much longer.",
        ),
    ] = None,
    variation: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            parser=number,
            metavar="SHARE",
            help="Times vary by this standard deviation.",
        ),
    ] = None,
) -> None:
    """Predict a training step on many GPUs: the best of data x tensor x pipeline parallel."""
    with bad_input():
        from ..scale import Job, Transformer, best

        model = Transformer(layers, width, sequence, vocabulary)
        job = Job(model, batch, microbatch, int(zero), cast("Recomputed", recompute))
        cluster = replace(boxes_of(gpu, box), cards=cards)
        found = {n: best(job, cluster, n, schedule, top) for n in gpus}
        all_found = [each for predictions in found.values() for each in predictions]
        more = [] if slowdown is None else slowed_lines(job, cluster, all_found, slowdown)
        more += [] if variation is None else varied_lines(job, cluster, all_found, variation)
    below = [*notes(job, found), *more]
    print_table(HEADINGS, map(row, all_found), below, words=["schedule"], whole=WHOLE)


def notes(job: "Job", found: "dict[int, list[Prediction]]") -> list[str]:
    """The lines below the table."""
    lines = [f"{job.model.num_parameters / 1e9:.3g} billion parameters. {NOTE}"]
    lines += [
        f"{counted(num_gpus, 'GPU')}: no layout divides batch, layers and boxes and fits"
        for num_gpus, predictions in found.items()
        if not predictions
    ]
    if any(each.over_boxes for predictions in found.values() for each in predictions):
        lines.append(OVER_BOXES)
    return lines


def boxes_of(gpu: str, box: str | None) -> "Cluster":
    """Boxes like that of a profile, or else of eight GPUs."""
    from ..boxes import load
    from ..scale import BY_NAME, cluster_of

    require_one_of("GPU", gpu, BY_NAME)
    return BY_NAME[gpu] if box is None else cluster_of(load(box))


def slowed_lines(
    job: "Job", cluster: "Cluster", predictions: "list[Prediction]", slowdown: float
) -> list[str]:
    """The cost of a slow GPU for each."""
    from ..scale import straggler

    lines = []
    for of in predictions:
        costs = straggler(job, cluster, of.layout, of.schedule, slowdown)
        lines.append(
            f"{of.layout.num_gpus} GPUs, {of.layout}, {of.schedule}, one GPU {slowdown:g} times as "
            f"slow: step +{costs.worst:.1%} at its worst place in a pipeline, +{costs.mean:.1%} on "
            "average over the places"
        )
    return lines


def varied_lines(
    job: "Job", cluster: "Cluster", predictions: "list[Prediction]", variation: float
) -> list[str]:
    """The cost of times that vary for each."""
    from ..scale import planned
    from ..scale.jitter import jitter

    lines = []
    for of in predictions:
        plan, costs = planned(job, cluster, of.layout, of.schedule)
        found = jitter(plan, costs, variation, pipelines=of.layout.data)
        means = found.mean_ns - found.even_ns, found.percentile_95_ns - found.even_ns
        mean, late = (each / of.step_ns for each in means)
        waits = " to ".join(f"{each(found.waits_ns) / 1e6:,.1f}" for each in (min, max))
        lines.append(
            f"{of.layout.num_gpus} GPUs, {of.layout}, {of.schedule}, times that vary by "
            f"{variation:.0%}: step +{mean:.1%} on average, +{late:.1%} at the 95th percentile; "
            f"GPUs wait {waits} ms for their peers"
        )
    return lines


def row(of: "Prediction") -> list[str]:
    """Under the headings."""
    return [
        f"{of.layout.num_gpus}",
        f"{of.layout}{'*' * of.over_boxes}",
        of.schedule,
        f"{of.step_ns / 1e6:,.0f}",
        f"{of.flops_ratio:.1%}",
        f"{of.bubble_ratio:.1%}",
        f"{of.tensor_ns / 1e6:,.0f}",
        f"{(of.reduction_ns + of.gather_ns) / 1e6:,.0f}",
        f"{(of.exposed_ns + of.gather_ns) / 1e6:,.0f}",
        f"{of.memory_bytes / 1e9:,.0f}",
    ]

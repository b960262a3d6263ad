"""`pykern verify`: steps of pipelines compared with the plain model, schedule by schedule."""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ..schedules import by_name, require_named
from .errors import bad_input
from .reports import print_table
from .schedule_options import Given, of_schedule, require_owned, with_schedule_options
from .sources import CATALOGUE
from .values import DeviceNames, Microbatches, RecomputeLevel, amount_option, number_option
from .workloads import MakeWorkload, ModelSource, workload_of

if TYPE_CHECKING:
    from ..plan import Plan

NOTE = (
    "Each schedule runs the steps, which accumulate gradients, and a forward. Loss, gradients, "
    "buffers, outputs and random numbers are compared with the plain model run microbatch by "
    "microbatch."
)


class Verdict(NamedTuple):
    """The result of a schedule.

    Attributes:
        schedule: its name.
        stages: the number of stages; empty if the model was not cut.
        verdict: "equal", "differs", "fails" or "refused".
        detail: the difference, or the reason for which the comparison failed.
    """

    schedule: str
    stages: str
    verdict: str
    detail: str = ""


@with_schedule_options
def verify(
    source: ModelSource = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help=f"{CATALOGUE} May be repeated.", show_default="all")
    ] = None,
    devices: DeviceNames = "cpu:2",
    microbatches: Microbatches = 4,
    steps: Annotated[int, number_option(about="Steps of each schedule.")] = 2,
    recompute: RecomputeLevel = "none",
    rtol: Annotated[
        float, amount_option(least=0, about="Tolerance relative to the plain model's values.")
    ] = 0.0,
    atol: Annotated[float, amount_option(least=0, about="Absolute tolerance.")] = 0.0,
    *,
    options: Given,
) -> None:
    """Compare pipelines with the plain model, bit by bit; exit with 1 if a pipeline differs."""
    names = schedule or list(by_name)
    with bad_input():
        for name in names:
            require_named(name)
        require_owned(names, options)
        make = workload_of(source)
        from ..modes import torch_threads
        from ..runtime.devices import parse_devices
        from ..verify import Verify

        num_devices = len(parse_devices(devices))
        checks = Verify(1, rtol, atol)
        settings = {"devices": devices, "recompute": recompute, "verify": checks}
    verdicts = []
    with torch_threads(1):
        for name in names:
            try:
                plan = by_name[name](num_devices, microbatches, **of_schedule(name, options))
            except ValueError as error:
                verdicts.append(Verdict(name, "", "refused", str(error)))
                continue
            verdicts.append(_verdict(name, plan, make, settings, steps))
    words = ("schedule", "verdict", "first difference, or reason")
    headings = ("schedule", "stages", *words[1:])
    print_table(headings, verdicts, [NOTE], words=words, whole=words[:2])
    found = {one.verdict for one in verdicts}
    if found & {"differs", "fails"} or "equal" not in found:
        raise typer.Exit(1)


def _verdict(
    name: str, plan: "Plan", make: MakeWorkload, settings: dict[str, Any], steps: int
) -> Verdict:
    from ..partition.chain import call_of
    from ..pipeline.pipeline import Pipeline
    from ..plan import Kind
    from ..verify import VerifyError

    with bad_input():
        workload = make(plan.num_stages)
        args, kwargs = call_of(workload.inputs)
        sample = workload.sample(plan.num_microbatches)
    if sample is not None:
        settings = settings | {"sample": sample}
    trains = plan.has(Kind.B) or plan.has(Kind.I)
    if not trains:
        settings = settings | {"recompute": None}
    try:
        pipe = Pipeline(workload.model, schedule=plan, loss_fn=workload.loss_fn, **settings)
    except (TypeError, ValueError) as error:
        return Verdict(name, "", "refused", str(error))
    stages = str(pipe.partition.num_stages)
    try:
        with pipe:
            for _ in range(steps if trains else 0):
                pipe.step(*args, target=workload.target, **kwargs)
            pipe.eval()
            pipe(*args, **kwargs)
    except VerifyError as error:
        return Verdict(name, stages, "differs", str(error))
    except Exception as error:
        return Verdict(name, stages, "fails", f"{type(error).__name__}: {error}")
    return Verdict(name, stages, "equal")

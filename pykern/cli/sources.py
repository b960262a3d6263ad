"""Sources of plans: a name of the catalogue, or a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..columns import counted
from ..plan import Costs, Kind, Plan, load_plan_and_costs
from ..plan.files import SUFFIXES
from ..plan.shares import Shares
from ..schedules import by_name, require_named
from .schedule_options import Given, of_schedule, require_owned
from .search import AUTO, Search
from .values import Stages

NUM_DEVICES = 4
NUM_MICROBATCHES = 8

CATALOGUE = f"One of {', '.join(by_name)}."
# Schedules that the demo refuses: stages cannot run the first, the second has no backward, and
# steps of the others update the weights.
_NOT_TRAINED = {"seq1f1b", "forward_only", "pipedream", "pipedream_2bw"}
TRAINED = [name for name in by_name if name not in _NOT_TRAINED]


class Counts(NamedTuple):
    """Devices and microbatches of all replicas; None to take the plan's number, or the default."""

    devices: int | None
    microbatches: int | None
    replicas: int = 1
    default_devices: int = NUM_DEVICES

    def shares(self) -> Shares:
        """The counts shared out to the replicas, with defaults for counts that are not given.

        Raises:
            ValueError: the devices cannot be shared out, or a replica would have no microbatch.
        """
        devices, microbatches = (
            self.devices or self.default_devices,
            self.microbatches or NUM_MICROBATCHES,
        )
        return Shares(devices, microbatches, self.replicas)


class PlanSource(NamedTuple):
    """A plan, its label, and the costs of its file, if the file has costs."""

    label: str
    plan: Plan
    costs: Costs | None


class Costed(NamedTuple):
    """A source, the costs of its actions, and the former plan if recompute was added."""

    source: PlanSource
    costs: Costs
    former: Plan | None = None


def scheduled(name: str, num_devices: int, num_microbatches: int, options: Given) -> Plan:
    """The plan of a schedule of the catalogue, refusing options that it does not have."""
    require_named(name)
    require_owned([name], options)
    return by_name[name](num_devices, num_microbatches, **options)


def require_backwards(schedule: str, plan: Plan, why: str) -> None:
    """Refuses a schedule of forwards alone.

    Raises:
        ValueError: The plan has no backward; `why` it must have one ends the message.
    """
    if not (plan.has(Kind.B) or plan.has(Kind.I)):
        raise ValueError(f"--schedule must have backwards, got {schedule!r}. {why}")


def sources_of(
    names: Sequence[str], counts: Counts, options: Given, search: Search
) -> list[PlanSource]:
    """The plans of these names or files, all for the same counts.

    Args:
        names: Names of schedules or files; a name with the suffix of a plan's file is a file.
        counts: Counts that are not given are taken from a file, also for the schedules beside it.
        options: Options of the schedules; each must belong to one of them.
        search: Makes the plan of the name "auto".

    Returns:
        A plan for each name, in the order of the names.

    Raises:
        ValueError: A name is unknown, no schedule has an option, or a count differs from a file's.
        OSError: A file cannot be read.
    """
    files = {name: load_plan_and_costs(name) for name in names if is_file(name)}
    for name in names:
        if name not in files and name != AUTO:
            require_named(name)
    require_owned([name for name in names if name not in files] or [names[0]], options)
    for name, (plan, _) in files.items():
        counts = counts_with(name, plan, counts)
    shares = counts.shares()
    num_devices, num_microbatches = shares.devices_of_one, shares.microbatches_of_one
    assert num_microbatches is not None
    shown = {name: Path(name).name for name in files}
    if len(set(shown.values())) < len(shown):
        shown = {name: name for name in files}
    sources = []
    for name in names:
        if name in files:
            plan, costs = files[name]
        elif name == AUTO:
            plan, costs = search(num_devices, num_microbatches), None
        else:
            plan = by_name[name](num_devices, num_microbatches, **of_schedule(name, options))
            costs = None
        plan = shares.side_by_side(plan)
        numbers = [counted(plan.num_stages, "stage"), counted(plan.num_microbatches, "microbatch")]
        if counts.replicas > 1:
            numbers.append(counted(counts.replicas, "replica"))
        label = ", ".join([shown.get(name, name), *numbers])
        sources.append(PlanSource(label, plan, costs))
    return sources


def require_stages(option: str, stages: Stages, source: PlanSource) -> None:
    """Refuses stages that the plan lacks.

    Raises:
        ValueError: The option names one.
    """
    for stage in stages.numbers or ():
        if stage >= source.plan.num_stages:
            raise ValueError(
                f"{option} must name stages 0 to {source.plan.num_stages - 1} for {source.label}, "
                f"got stage {stage}"
            )


def is_file(name: str) -> bool:
    """Whether the name is that of a file, not of a schedule."""
    return Path(name).suffix.lower() in SUFFIXES


def counts_with(name: str, plan: Plan, counts: Counts) -> Counts:
    """The counts, which must be those of this file's plan."""
    many = counts.replicas
    own = Counts(plan.num_devices * many, plan.num_microbatches * many, many)
    whose = f" for each of {many} replicas" if many > 1 else ""
    if counts.devices not in (None, own.devices):
        raise ValueError(
            f"--devices must be {plan.num_devices}{whose}, as in the plan in {name}, got "
            f"{counts.devices}"
        )
    if counts.microbatches is None:
        return own
    if -(-counts.microbatches // many) != plan.num_microbatches:
        raise ValueError(
            f"--microbatches must be {plan.num_microbatches}{whose}, as in the plan in {name}, got "
            f"{counts.microbatches}"
        )
    return own._replace(microbatches=counts.microbatches)

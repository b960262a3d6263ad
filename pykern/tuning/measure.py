"""Runs a model on its devices, and measures the times and bytes of its units."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from math import ceil, inf
from statistics import mean, median

from ..plan.shares import Shares
from ..runtime.features.order_of_writes import WrittenInReplicas
from ..schedules import by_name
from ..sizes.parameters import state_bytes
from ..sizes.with_values import WithValues
from ..sizes.without_values import WithoutValues
from ..tensors.parameters import bytes_of, gradient_bytes, held_by
from .asked import Asked
from .by_unit import by_unit, even_spans
from .held import held as held_bytes
from .measurements import Measurements, Table
from .overheads import Overheads, overheads
from .progress import Tell
from .rounds import Rounds, beside_all
from .shared_cores import lost_ns, speeds_seen

# The number of rounds that count, after the warm-up rounds.
WARMUPS, ROUNDS = 1, 4
# Sizes of microbatches that are measured, evenly on the scale of their logarithm.
MOST_SIZES = 3
# Times as many microbatches as devices: most of a step is neither warm-up nor cool-down.
DEPTH = 2

# Schedules that show the times of some kinds of actions, or of none.
_SCHEDULES = {"FB": "one_f_one_b", "IW": "zb_h1", "": "one_f_one_b"}


def measure(asked: Asked, tell: Tell) -> Measurements:
    """Measures the time that the units of the model take and the bytes that they hold."""
    sizes, weights = sizes_to_measure(asked), weights_of(asked)
    held = bytes_held(asked, sizes)
    sizes = sizes[: that_fit(asked, held["B ops F own"], weights)]
    beside = overheads(asked.names[: asked.num_cores])
    with ExitStack() as opened:
        *forms, coarse = _forms(opened, asked, sizes)
        for number in range(WARMUPS + ROUNDS):
            for form in [*forms, coarse]:
                form.run(asked, counts=number >= WARMUPS)
            tell((number + 1) / (WARMUPS + ROUNDS))
    reduce_ns, replica_ns = _of_replicas(asked, beside)
    return Measurements(
        subject=asked.subject,
        units=asked.units.names,
        rows=sizes,
        times_ns={
            kind: tuple(form.times_ns(kind, size) for size in sizes)
            for form in forms
            for kind in form.kinds
        },
        sizes={name: table[: len(sizes)] for name, table in held.items()},
        weights=weights,
        reduce_ns=reduce_ns,
        replica_ns=replica_ns,
        handover_ns=tuple(_usual(forms[-1].handed_ns(size)) for size in sizes),
        cores=asked.num_cores,
        speeds=tuple(tuple(_speeds(forms, size)) for size in sizes),
        crowded_ns=_crowded_ns(forms, sizes),
        action_ns={
            "F": tuple(_action_ns(forms, coarse, "F", size) for size in sizes),
            "B": tuple(_action_ns(forms, coarse, "B", size) for size in sizes),
            **dict.fromkeys("IW", (beside.half_ns,) * len(sizes)),
        },
        issue_ns=beside.issue_ns,
        step_ns=beside.step_ns,
        setup_ns=beside.setup_ns,
    )


def sizes_to_measure(asked: Asked) -> tuple[int, ...]:
    """A few numbers of rows, from 1 to those of a batch shared out among devices with own cores."""
    most = max(asked.rows // asked.num_cores, min(asked.rows, 2))
    steps = range(MOST_SIZES)
    return tuple(sorted({round(most ** (step / (MOST_SIZES - 1))) for step in steps}))


def that_fit(asked: Asked, activation: Table, weights: Sequence[float]) -> int:
    """How many of the sizes can be measured in the memory; the smallest always is."""
    memory, devices = asked.memory_of_each, min(asked.num_cores, len(weights))
    if memory is None:
        return len(activation)
    spans = even_spans(len(weights), devices)

    def fits(of_units: Sequence[float]) -> bool:
        # The plans that are measured have as many microbatches in flight as devices remain.
        in_flight = range(devices, 0, -1)
        return all(
            sum(weights[unit] + count * of_units[unit] for unit in span) <= memory
            for span, count in zip(spans, in_flight, strict=True)
        )

    return max(sum(map(fits, activation)), 1)


def _forms(opened: ExitStack, asked: Asked, sizes: Sequence[int]) -> list[Rounds]:
    """Those that show kinds, on all cores; of CPU workers one alone first, and all of them later.

    The last has as few stages as devices, and all others have a stage for each unit. GPUs do not
    slow each other down, and the layers of a model are on one device each at a time.
    """
    num_units = len(asked.units.names)
    most = min(asked.num_devices, num_units)
    together = min(asked.num_cores, most)

    def form(kinds: str, num_devices: int, *, coarse: bool = False) -> Rounds:
        plan = by_name[_SCHEDULES[kinds]](num_devices, DEPTH * num_devices)
        spans = even_spans(num_units, num_devices)
        if not coarse:
            plan, spans = by_unit(plan, spans), even_spans(num_units, num_units)
        pipe = opened.enter_context(asked.pipeline(plan, spans))
        batches = {size: asked.batch(size * plan.num_microbatches) for size in sizes}
        return Rounds(kinds, pipe, batches)

    shown = [form("IW", together), form("FB", together)]
    if not asked.gpus:
        shown = [form("", 1), *shown]
        if most > together:
            shown.append(form("", most))
    return [*shown, form("FB", together, coarse=True)]


def _speeds(forms: Sequence[Rounds], size: int) -> list[float]:
    """The speeds of devices by how many of them compute, 1 being that of the measured times."""
    if forms[0].kinds:
        return [1.0] * forms[0].pipe.plan.num_devices
    alone, _, together = forms[:3]
    plan, work = together.pipe.plan, together.work_ns(size)
    speeds = [max(work / alone.work_ns(size), 1.0)]
    if plan.num_devices == 1:
        return speeds
    works = [of_round * plan.num_microbatches for of_round in together.works_ns(size)]
    return speeds_seen(together.timelines[size], works, speeds)


def _usual(delays: Sequence[float]) -> float:
    """The mean without the slowest tenth, those of threads that had no core; 0 without delays."""
    return mean(sorted(delays)[: ceil(0.9 * len(delays))] or [0.0])


def _crowded_ns(forms: Sequence[Rounds], sizes: Sequence[int]) -> float:
    """The time that an action loses, and each of its units, where devices share cores."""
    *_, together, most = forms
    plan = most.pipe.plan
    if plan.num_devices == together.pipe.plan.num_devices:
        return 0.0
    # A machine changes its speed between rounds, so a step is compared with that beside it.
    lost = [
        lost_ns(timeline, work * plan.num_microbatches, speeds)
        for size in sizes
        for speeds in [_speeds(forms, size)]
        for timeline, work in zip(most.timelines[size], together.works_ns(size), strict=True)
    ]
    # Here each action has one unit.
    return max(median(lost) / 2, 0.0)


def _action_ns(forms: Sequence[Rounds], coarse: Rounds, kind: str, size: int) -> float:
    """How much longer F or B of several units takes in as many stages, for each stage more.

    Args:
        forms: with a stage for each unit.
        coarse: with few stages.
        kind: "F" or "B".
        size: the rows of a microbatch.
    """
    fine = next(form for form in forms if kind in form.kinds)
    further = fine.pipe.plan.num_stages - coarse.pipe.plan.num_stages
    apart = sum(fine.times_ns(kind, size)) - sum(coarse.times_ns(kind, size))
    return max(apart / further, 0.0) if further > 0 else 0.0


def _of_replicas(asked: Asked, beside: Overheads) -> tuple[tuple[float, ...], float]:
    """By unit, the time to sum another replica's gradients; and a replica's part of a step.

    That is infinite where a model cannot have replicas, which may show in a step only.
    """
    unknown = (0.0,) * len(asked.units.names)
    if asked.num_devices == 1:
        return unknown, 0.0
    if not asked.can_have_replicas:
        return unknown, inf
    try:
        seen = _seen_of_replicas(asked, beside)
    except WrittenInReplicas:
        return unknown, inf
    # Replicas on one core show no times of their own.
    return seen if asked.num_cores > 1 else (unknown, 0.0)


def _seen_of_replicas(asked: Asked, beside: Overheads) -> tuple[tuple[float, ...], float]:
    """The same, from steps of two replicas.

    Raises:
        WrittenInReplicas: a forward writes to a buffer.
    """
    num_units = len(asked.units.names)
    plan = by_unit(by_name["gpipe"](1, 1), [range(num_units)])
    plan = Shares(2, 2, 2).side_by_side(plan)
    (args, kwargs), target = asked.batch(2)
    costs, outside = [], []
    with asked.pipeline(plan, even_spans(num_units, num_units)) as pipe:
        for number in range(WARMUPS + ROUNDS):
            asked.wait()
            start = time.perf_counter_ns()
            with beside_all(asked, plan.num_devices), pipe.tracing():
                pipe.step(*args, target=target, **kwargs)
            asked.wait()
            took = time.perf_counter_ns() - start
            if number >= WARMUPS:
                costs.append(pipe.costs())
                outside.append(took - pipe.timeline().makespan_ns)
        num_actions = pipe.plan.num_actions
    alone = beside.step_ns + beside.setup_ns * num_actions
    reduce_ns = zip(*(one.reduce_ns for one in costs), strict=True)
    return tuple(map(median, reduce_ns)), max(median(outside) - alone, 0.0)


def bytes_held(asked: Asked, sizes: Sequence[int]) -> dict[str, Table]:
    """The tables of `Measurements.sizes`, for GPUs without using them."""
    if not asked.gpus:
        return held_bytes(asked, sizes)
    try:
        with asked.on_cpu(WithoutValues()) as twin:
            return held_bytes(twin, sizes)
    except Exception:
        # The model may look at values, as `.item()` does. For any other reason it raises again.
        with asked.on_cpu(WithValues()) as twin:
            return held_bytes(twin, sizes)


def weights_of(asked: Asked) -> tuple[float, ...]:
    """By unit, the bytes that are held all the time."""
    held = []
    for layers in asked.units.modules():
        parameters, buffers, trained = held_by(layers)
        num_bytes = bytes_of([*parameters, *buffers]) + gradient_bytes(trained)
        if asked.optimizer is not None:
            # A step would move the parameters of the model itself.
            num_bytes += state_bytes(asked.optimizer, WithoutValues().batch(trained))
        held.append(float(num_bytes))
    return tuple(held)

"""Runs a model on its devices, and measures the times and bytes of its units."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

from ..budget.level_costs import StageCosts
from ..budget.measure import measure as measure_levels
from ..modes import threads_of_a_worker
from ..pipeline.pipeline import Pipeline
from ..plan import Costs
from ..plan.shares import Shares
from ..runtime.loss import Losses
from ..runtime.recompute.recompute import Level
from ..runtime.stage.stage import Stage
from ..schedules import by_name
from ..sizes.parameters import state_bytes
from ..sizes.without_values import WithoutValues
from ..tensors.parameters import bytes_of, held_by
from ..trace.routes import everywhere
from .asked import Asked
from .by_unit import by_unit, even_spans
from .measurements import SIZES, Measurements, Table
from .overheads import KINDS, Overheads, overheads
from .progress import Tell

# The number of rounds that count, after the warm-up rounds.
WARMUPS, ROUNDS = 2, 7
# Sizes of microbatches that are measured, evenly on the scale of their logarithm.
MOST_SIZES = 4
# Times as many microbatches as devices: most of a step is neither warm-up nor cool-down.
DEPTH = 3

# Kinds that are measured, and a schedule that has them.
_FORMS = {"FB": "one_f_one_b", "IW": "zb_h1"}
_LEVELS: tuple[Level, ...] = ("ops", "layer")


@dataclass
class _Form:
    """A pipeline whose steps show the times of some kinds of actions, and what they took."""

    kinds: str
    pipe: Pipeline
    # The costs of each round, by size of microbatches.
    costs: dict[int, list[Costs]]


def measure(asked: Asked, tell: Tell) -> Measurements:
    """Measures the time that the units of the model take and the bytes that they hold."""
    sizes = sizes_to_measure(asked.rows)
    times, speeds = _times(asked, sizes, tell)
    held = _held(asked, sizes)
    beside = overheads(asked.num_cores)
    reduce_ns, replica_ns = _of_replicas(asked, beside)
    return Measurements(
        units=asked.units.names,
        rows=sizes,
        times_ns=times,
        sizes=held,
        weights=_weights(asked),
        reduce_ns=reduce_ns,
        replica_ns=replica_ns,
        speeds=speeds,
        **vars(beside),
    )


def sizes_to_measure(rows: int) -> tuple[int, ...]:
    """A few numbers of rows, from 1 to a whole batch."""
    steps = range(MOST_SIZES)
    return tuple(sorted({round(rows ** (step / (MOST_SIZES - 1))) for step in steps}))


def _times(
    asked: Asked, sizes: Sequence[int], tell: Tell
) -> tuple[dict[str, Table], tuple[float, ...]]:
    """The times by kind, size and unit: medians of rounds of all forms and sizes in turn.

    Returns:
        These, and the speeds of devices by how many of them compute.
    """
    num_units = len(asked.units.names)
    num_devices = min(asked.num_cores, num_units)
    with ExitStack() as opened:
        forms = [_open(opened, asked, *form, num_devices) for form in _FORMS.items()]
        with threads_of_a_worker(asked.num_devices):
            alone = _open(opened, asked, "", "one_f_one_b", 1)
        for number in range(WARMUPS + ROUNDS):
            for form in [*forms, alone]:
                for size in sizes:
                    batch = asked.batch(size * form.pipe.plan.num_microbatches)
                    (args, kwargs), target = batch
                    form.pipe.step(*args, target=target, **kwargs)
                    if number >= WARMUPS:
                        form.costs.setdefault(size, []).append(form.pipe.costs())
            tell((number + 1) / (WARMUPS + ROUNDS))
    times = {
        kind: tuple(_medians(form.costs[size], KINDS[kind], num_units) for size in sizes)
        for form in forms
        for kind in form.kinds
    }
    return times, _speeds(num_devices, asked.num_cores, _work(forms[0]) / _work(alone))


def _open(opened: ExitStack, asked: Asked, kinds: str, schedule: str, num_devices: int) -> _Form:
    num_units = len(asked.units.names)
    plan = by_name[schedule](num_devices, DEPTH * num_devices)
    fine = by_unit(plan, even_spans(num_units, num_devices))
    pipe = opened.enter_context(asked.pipeline(fine, even_spans(num_units, num_units)))
    return _Form(kinds, pipe, {})


def _work(form: _Form) -> float:
    """The time of F and B of all units, for one microbatch of the largest size."""
    rounds, num_units = form.costs[max(form.costs)], form.pipe.plan.num_stages
    return sum(sum(_medians(rounds, KINDS[kind], num_units)) for kind in "FB")


def _speeds(num_measured: int, num_cores: int, slower: float) -> tuple[float, ...]:
    """The speeds from one device alone evenly down to 1, for as many devices as were measured.

    Args:
        num_measured: the number of devices that computed together.
        num_cores: the number of devices that can compute at once.
        slower: the time of the devices together, divided by the time of one device alone.
    """
    faster = max(slower - 1, 0.0) / max(num_measured - 1, 1)
    return tuple(1 + faster * max(num_measured - n, 0) for n in range(1, num_cores + 1))


def _medians(rounds: Sequence[Costs], name: str, num_units: int) -> tuple[float, ...]:
    by_round = [getattr(costs, name) for costs in rounds]
    return tuple(median(times[unit] for times in by_round) for unit in range(num_units))


def _of_replicas(asked: Asked, beside: Overheads) -> tuple[tuple[float, ...], float]:
    """By unit, the time to sum another replica's gradients; and a replica's part of a step."""
    num_units = len(asked.units.names)
    if asked.num_cores == 1 or not asked.can_have_replicas:
        return (0.0,) * num_units, 0.0
    plan = by_unit(by_name["gpipe"](1, 1), [range(num_units)])
    plan = Shares(2, 2, 2).side_by_side(plan)
    (args, kwargs), target = asked.batch(2)
    costs, outside = [], []
    with asked.pipeline(plan, even_spans(num_units, num_units)) as pipe:
        for number in range(WARMUPS + ROUNDS):
            start = time.perf_counter_ns()
            pipe.step(*args, target=target, **kwargs)
            took = time.perf_counter_ns() - start
            if number >= WARMUPS:
                costs.append(pipe.costs())
                outside.append(took - pipe.timeline().makespan_ns)
        num_actions = pipe.plan.num_actions
    alone = beside.step_ns + beside.setup_ns * num_actions
    return _medians(costs, "reduce_ns", num_units), max(median(outside) - alone, 0.0)


def _held(asked: Asked, sizes: Sequence[int]) -> dict[str, Table]:
    """The bytes of `Measurements.sizes`, by name, size and unit."""
    tables: dict[str, list[tuple[float, ...]]] = {name: [] for name in SIZES}
    for size in sizes:
        held = [_sizes_of(costs) for costs in _levels(asked, size)]
        for name, table in tables.items():
            table.append(tuple(of_unit[name] for of_unit in held))
    return {name: tuple(table) for name, table in tables.items()}


def _levels(asked: Asked, size: int) -> list[StageCosts]:
    """The bytes that each unit holds at each level, for a microbatch of `size` rows."""
    units = asked.units
    (args, kwargs), target = asked.batch(size)
    homes = [torch.device("cpu")] * len(units.names)
    units.chain.cut(units.layers, homes, everywhere)
    stages = [Stage(number, of, homes[0]) for number, of in enumerate(units.modules())]
    first, _ = units.chain.enter(args, kwargs)
    losses = Losses(asked.loss_fn, None if target is None else [target], [1.0])
    return measure_levels(stages, first, losses, _LEVELS, split=True, timed=False)


def _sizes_of(costs: StageCosts) -> dict[str, float]:
    kept, rebuilt = costs.kept["ops"], costs.rebuilt["layer"]
    return {
        "activation": kept.activation_bytes,
        "kept": kept.weights_bytes,
        "boundary": rebuilt.boundary_bytes,
        "rebuilt": rebuilt.activation_bytes,
        "handed": costs.handed_bytes,
        "workspace": costs.workspace_bytes,
    }


def _weights(asked: Asked) -> tuple[float, ...]:
    """By unit, the bytes that are held all the time."""
    held = []
    for layers in asked.units.modules():
        parameters, buffers, trained = held_by(layers)
        state = _state_bytes(asked.optimizer, trained)
        held.append(float(bytes_of([*parameters, *buffers, *trained]) + state))
    return tuple(held)


def _state_bytes(
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None, trained: list[nn.Parameter]
) -> int:
    if optimizer is None or not trained:
        return 0
    # A step would move the parameters of the model itself.
    return state_bytes(optimizer, WithoutValues().batch(trained))

"""The peak memory of each device in a training step, computed from a model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..budget.budget import Budget
from ..budget.fit_memory import most_held
from ..budget.level_costs import StageCosts, levels_of_stages
from ..budget.measure import measure_bytes
from ..columns import by_device
from ..partition.balance import Balance, Partition
from ..partition.chain import Chain, max_stages, open_model, share_out
from ..partition.layers import make_stages
from ..partition.split_points import SplitAt
from ..pipeline.choose_levels import RecomputeArgument, choose_levels
from ..pipeline.choose_plan import Schedule, choose_plan
from ..pipeline.memory import stages_on
from ..plan import Plan, lower, require_counts
from ..plan.counts import one_for_each, require_numbers
from ..plan.shares import Shares
from ..runtime.loss import Loss, Losses
from ..runtime.microbatch import batch_size
from ..runtime.stage.stage import Stage
from ..tensors.parameters import bytes_of, gradient_bytes, held_by
from ..trace.routes import everywhere
from .parameters import state_bytes
from .with_values import WithValues
from .without_values import WithoutValues

_CPU = torch.device("cpu")
_REMEDY = "If it looks at values, as .item() does, give pykern.estimate with_values=True"


@dataclass(frozen=True)
class Bytes:
    """The peak memory of one device, in bytes.

    Attributes:
        parameters: and buffers.
        gradients: of the parameters that train.
        optimizer: its state for them.
        activations: of all microbatches in flight at once, with what an action needs meanwhile.
        transfers: where a GPU receives what comes from other GPUs; CPU workers need none.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transfers: float

    @property
    def total(self) -> float:
        """All of it."""
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.transfers


@dataclass(frozen=True)
class Estimate:
    """The memory of a training step.

    Attributes:
        devices: what each holds.
        plan: of the step, with the R of what is recomputed.
        partition: which layers each stage has.
        handed_bytes: by stage, the bytes that it hands to the next one for a microbatch.
    """

    devices: Sequence[Bytes]
    plan: Plan
    partition: Partition
    handed_bytes: Sequence[float]

    def fits(self, memory: float | Sequence[float]) -> bool:
        """Whether every device has enough memory.

        Args:
            memory: bytes of each device: one number for all, or a list with one for each.

        Raises:
            TypeError, ValueError: a value is not a number, or the list has another length.
        """
        room = one_for_each("memory", memory, len(self.devices), "devices")
        for has in room:
            require_numbers(memory=has)
        return all(held.total <= has for held, has in zip(self.devices, room, strict=True))

    def __str__(self) -> str:
        """A table with a row for each device."""
        return by_device([*(field.name for field in fields(Bytes)), "total"], self.devices)


def estimate(  # noqa: PLR0913 - a pipeline and what it trains with, by keyword
    model: nn.Module | Sequence[nn.Module],
    *,
    devices: int,
    sample: Any,
    loss_fn: Loss,
    target: Any = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    schedule: Schedule = "one_f_one_b",
    microbatches: int | None = None,
    recompute: RecomputeArgument = None,
    balance: Balance | None = None,
    split_at: SplitAt | None = None,
    whole: Sequence[str] = (),
    with_values: bool = False,
    **options: Any,
) -> Estimate:
    """The peak memory of each device of a pipeline in a training step.

    One microbatch runs through the stages with torch's fake tensors, which have sizes and no
    memory; the plan says how many microbatches a device has in flight. The model may be made under
    `torch.device("meta")`, without weights, or be a real one, which is left alone. An allocator
    takes more: what it keeps in reserve, and what kernels use while they run, are not counted.
    Fake tensors have no values: a forward that calls `.item()` or indexes by a mask raises, but
    for `with_values=True`.

    Args:
        model: as for `Pipeline`.
        devices: how many.
        sample: input of one microbatch, as for `Pipeline`; floating point values do not matter, and
            integers on "meta" count as 0.
        loss_fn: as for `Pipeline`.
        target: of the loss for the sample; None where `step` gets none.
        optimizer: makes the optimizer of a list of parameters, such as `torch.optim.AdamW`; None
            leaves its state out.
        schedule: as for `Pipeline`, with its options; microbatches: likewise.
        microbatches: of a step.
        recompute: as for `Pipeline`, without a `Budget`.
        balance: as for `Pipeline`, but for "time".
        split_at: as for `Pipeline`.
        whole: as for `Pipeline`.
        with_values: whether the CPU computes the microbatch, with its memory and time, and the
            optimizer's step, with copies of parameters. Sizes that depend on values are the
            sample's.
        **options: for the schedule.

    Raises:
        TypeError, ValueError, CutError, PlanError: as `Pipeline`, or the optimizer's step looks at
            values.
        BaseException: what the model raises for the sample, with a note.
    """
    _require_arguments(devices, sample, loss_fn, optimizer, balance, recompute)
    batch_size({"sample": sample, "target": target})
    chosen = choose_plan(schedule, Shares(devices, microbatches), max_stages(model), options)
    if chosen.first_trained == chosen.num_stages:
        raise ValueError(
            f"schedule must have backwards, got {schedule!r}. An estimate is of a training step"
        )
    plan, levels = choose_levels(chosen, recompute)
    shapes = WithValues() if with_values else WithoutValues(_REMEDY)
    twin, sample, target = shapes.model(model), shapes.batch(sample), shapes.batch(target)
    with shapes.in_force():
        chain = open_model(twin, sample, plan.num_stages, split_at, whole)
        of_layers = None if isinstance(chain, Chain) and balance != "memory" else sample
        cut = share_out(chain, plan.num_stages, balance, of_layers, split_at)
        homes = [_CPU] * plan.num_stages
        chain.cut(cut.stages, homes, everywhere)
        stages = make_stages(list(chain.layers.values()), cut, homes)
        of_stages = levels_of_stages(plan.num_stages, levels)
        losses = Losses.of_one(loss_fn, target)
        costs = measure_bytes(stages, (chain.first_input(sample),), losses, plan, of_stages)
        held_alone = [
            _of_parameters(stages_on(plan, stages, device), optimizer, shapes)
            for device in range(plan.num_devices)
        ]
    activations = most_held(plan, costs, of_stages)
    transfers = _transfers(plan, costs)
    return Estimate(
        [
            Bytes(*held_alone[device], held, received)
            for device, (held, received) in enumerate(zip(activations, transfers, strict=True))
        ],
        plan,
        cut,
        [stage.handed_bytes for stage in costs],
    )


def _require_arguments(
    devices: int,
    sample: object,
    loss_fn: object,
    optimizer: object,
    balance: object,
    recompute: object,
) -> None:
    """Refuses arguments that `Pipeline` takes in another form, and forgotten ones."""
    require_counts(devices=devices)
    if sample is None:
        raise TypeError("sample must be the input of one microbatch, got None")
    for name, value in (("loss_fn", loss_fn), ("optimizer", optimizer)):
        if not callable(value) and not (name == "optimizer" and value is None):
            raise TypeError(
                f"{name} must be callable, got {type(value).__name__}. Give a function, such as "
                + ("a class of torch.optim" if name == "optimizer" else "F.cross_entropy")
            )
    if balance == "time":
        raise ValueError("balance must not be 'time' here, since nothing is run. Leave it out")
    if isinstance(recompute, Budget):
        raise TypeError(
            "recompute must be a level, got a Budget. Try levels, and compare with fits"
        )


def _of_parameters(
    stages: Sequence[Stage],
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    shapes: WithValues | WithoutValues,
) -> tuple[float, float, float]:
    """The bytes of parameters with buffers, of gradients, and of what the optimizer keeps."""
    parameters, buffers, trained = held_by(layer for of in stages for layer in of.originals)
    return (
        bytes_of([*parameters, *buffers]),
        gradient_bytes(trained),
        0 if optimizer is None else state_bytes(optimizer, shapes.trained(trained)),
    )


def _transfers(plan: Plan, costs: Sequence[StageCosts]) -> list[float]:
    """The bytes in which each device receives activations and gradients."""
    received = [0.0] * plan.num_devices
    for ring in lower(plan).rings():
        homes = plan.placement.replicas[ring.replica]
        stage, here = ring.stage, ring.device
        if stage > 0 and homes[stage - 1] != here:
            received[here] += ring.num_slots * costs[stage - 1].handed_bytes
        if stage + 1 < plan.num_stages and homes[stage + 1] != here:
            received[here] += ring.num_slots * costs[stage].handed_bytes
    return received

"""The peak memory of each device in a training step, computed from a model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..budget.budget import Budget
from ..budget.fit_memory import most_held
from ..budget.level_costs import StageCosts, levels_of_stages
from ..columns import by_device
from ..partition.balance import Balance, Partition
from ..partition.chain import max_stages
from ..partition.layers import refuse_lazy
from ..partition.split_points import SplitAt
from ..pipeline.arguments import require_functions, require_target
from ..pipeline.choose_levels import RecomputeArgument, choose_levels
from ..pipeline.choose_plan import Schedule, choose_plan
from ..plan import Plan, lower, require_counts
from ..plan.counts import one_for_each, require_numbers
from ..plan.shares import Shares
from ..runtime.loss import Loss
from ..runtime.microbatch import batch_size
from .step_model import StepModel


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
    of = StepModel(
        model,
        devices,
        loss_fn,
        optimizer,
        schedule,
        balance,
        split_at,
        whole,
        with_values,
        options,
    )
    return estimate_step(of, sample, target, microbatches, recompute)


def estimate_step(
    of: StepModel,
    sample: Any,
    target: Any,
    microbatches: int | None,
    recompute: RecomputeArgument,
) -> Estimate:
    """The peak memory of each device, as by `estimate`; what was measured before is taken."""
    _require_arguments(of, sample, recompute)
    require_target(of.loss_fn, target)
    rows = batch_size({"sample": sample, "target": target})
    shares = Shares(of.devices, microbatches)
    chosen = choose_plan(of.schedule, shares, max_stages(of.model), of.options)
    if chosen.first_trained == chosen.num_stages:
        raise ValueError(
            f"schedule must have backwards, got {of.schedule!r}. An estimate is of a training step"
        )
    plan, levels = choose_levels(chosen, recompute)
    of_stages = levels_of_stages(plan.num_stages, levels)
    sized = of.sized(rows, plan.num_stages, sample, target)
    costs = sized.costs(plan, of_stages)
    held_alone = sized.held_alone(plan)
    activations = most_held(plan, costs, of_stages)
    transfers = _transfers(plan, costs)
    return Estimate(
        [
            Bytes(*held_alone[device], held, received)
            for device, (held, received) in enumerate(zip(activations, transfers, strict=True))
        ],
        plan,
        sized.cut,
        [stage.handed_bytes for stage in costs],
    )


def _require_arguments(of: StepModel, sample: object, recompute: object) -> None:
    """Refuses arguments that `Pipeline` takes in another form, and forgotten ones."""
    require_counts(devices=of.devices)
    refuse_lazy(of.model)
    if sample is None:
        raise TypeError("sample must be the input of one microbatch, got None")
    require_functions(of.loss_fn, of.optimizer)
    if of.balance == "time":
        raise ValueError("balance must not be 'time' here, since nothing is run. Leave it out")
    if isinstance(recompute, Budget):
        raise TypeError(
            "recompute must be a level, got a Budget. Try levels, and compare with fits"
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

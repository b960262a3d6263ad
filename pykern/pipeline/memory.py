"""The memory that each device of a pipeline holds, by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..budget.fit_memory import most_held
from ..budget.level_costs import StageCosts, StageLevel, levels_of_stages
from ..budget.measure import StageTrials, named_levels, with_starts
from ..columns import by_device
from ..plan import Kind, Plan
from ..runtime import microbatch
from ..runtime.loss import Losses
from ..runtime.stage.stage import Stage
from ..tensors.parameters import bytes_of, distinct, gradient_bytes, held_by
from ..tensors.trees import Call
from .left_alone import left_alone
from .steps import Steps


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes; None for what is not known.

    Attributes:
        parameters: of the stages on the device.
        buffers: likewise.
        gradients: of the parameters that train, once a step has made them.
        optimizer: the state that the optimizer has now for these parameters.
        activations: the predicted peak of all that actions of a step hold.
        transfers: where a GPU receives what comes from other GPUs, as allocated by now; CPU
            workers need none.
        peak: the most that torch's allocator has had in use on the GPU since the process began, or
            since `torch.cuda.reset_peak_memory_stats`, with the memory of captured graphs.
        graphs: the pools of captured graphs on the GPU, those of other captures too, as reserved by
            torch's allocator now.
        free: the headroom: what the driver has free on the GPU now. torch's allocator may have
            more, which it keeps for reuse.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: float | None
    transfers: int
    peak: int | None
    graphs: int | None
    free: int | None


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all devices. Its string is a table, with a note for all that is unknown.

    Attributes:
        devices: what each holds.
        unknown: by name of a field that is None, why it is not known.
    """

    devices: Sequence[DeviceMemory]
    unknown: dict[str, str]

    def __str__(self) -> str:
        """The table, with the notes below it."""
        table = by_device([field.name for field in fields(DeviceMemory)], self.devices)
        names: dict[str, list[str]] = {}
        for name, why in self.unknown.items():
            names.setdefault(why, []).append(name)
        return "\n".join([table, *(f"{', '.join(of)}: {why}" for why, of in names.items())])


def memory_of(
    pipe: Steps,
    call: Call,
    target: Any,
    optimizer: Optimizer | None,
    *,
    can_predict: bool,
) -> MemoryReport:
    """The memory of all devices. See `Pipeline.memory`.

    Args:
        pipe: the pipeline.
        call: the arguments of a step; without any, activations are not predicted.
        target: of the step.
        optimizer: whose state counts; None if it is not known.
        can_predict: whether a microbatch can run through the stages, outside of a step.
    """
    unknown: dict[str, str] = {}
    activations: list[float] | None = None
    if not can_predict:
        unknown["activations"] = "not predicted for AsyncPipeline, nor with tensor_parallel."
    elif not any(call):
        unknown["activations"] = "not predicted without a batch. Give memory what step gets."
    elif pipe._loss_fn is None:
        unknown["activations"] = "not predicted for a loss outside of the pipeline."
    else:
        pipe._arguments.require(call, target=target, loss=pipe._loss_fn)
        with left_alone([pipe, pipe._loss_fn], [s.device for s in pipe._executor.stages]):
            found = held_by_stages(pipe, call, target)
        activations = None if found is None else most_held(pipe.plan, *found)
        if activations is None:
            unknown["activations"] = "not predicted for arguments by name."
    if optimizer is None:
        unknown["optimizer"] = "a pipeline does not know it. Give memory(optimizer=...)."
    driver = pipe._executor.driver
    devices = []
    for device in range(pipe.plan.num_devices):
        stages = stages_on(pipe.plan, pipe._executor.stages, device)
        parameters, buffers, trained = held_by(layer for of in stages for layer in of.originals)
        devices.append(
            DeviceMemory(
                bytes_of(parameters),
                bytes_of(buffers),
                gradient_bytes(trained),
                None if optimizer is None else _state_bytes(parameters, optimizer),
                None if activations is None else activations[device],
                driver.transfer_bytes(device),
                *_of_gpu(driver.device(device)),
            )
        )
    if any(device.peak is None for device in devices):
        of_gpus = "not measured on CPU workers, which share the memory of the process."
        unknown |= dict.fromkeys(("peak", "graphs", "free"), of_gpus)
    return MemoryReport(devices, unknown)


def stages_on(plan: Plan, stages: Sequence[Stage], device: int) -> list[Stage]:
    """The stages that a device has, in any replica."""
    homes = plan.placement.replicas
    return [stage for stage in stages if any(of[stage.index] == device for of in homes)]


def held_by_stages(
    pipe: Steps, call: Call, target: Any
) -> tuple[list[StageCosts], list[StageLevel]] | None:
    """The bytes of each stage, and its level; None if the first layer gets names."""
    of_first = args_and_loss(pipe, call, target)
    if of_first is None:
        return None
    plan, (args, losses) = pipe.plan, of_first
    levels = levels_of_stages(plan.num_stages, pipe._levels)
    stages, split = pipe._executor.stages, plan.has(Kind.I)
    trials = StageTrials(stages, args, losses, split=split, timed=False)
    return with_starts(trials.costs(named_levels(levels)), plan), levels


def args_and_loss(pipe: Steps, call: Call, target: Any) -> tuple[tuple[Any, ...], Losses] | None:
    """The first microbatch and its loss, outside of a step; None if the first layer gets names."""
    (args, kwargs), of_target = first_microbatch(pipe, call, target)
    if kwargs:
        return None
    assert pipe._loss_fn is not None
    in_one_memory = pipe._executor.in_one_memory
    return args, Losses.of_one(pipe._loss_fn, of_target, in_one_memory=in_one_memory)


def first_microbatch(pipe: Steps, call: Call, target: Any) -> tuple[Call, Any]:
    """The first microbatch, which is as large as any other, as the first stage takes it."""
    rows = pipe._rows(call, target)
    part, of_target = microbatch.split((call, target), rows)[0]
    (entered,) = pipe._chain.enter([part])
    assert entered is not None
    return entered, of_target


def _state_bytes(parameters: Sequence[Tensor], optimizer: Optimizer) -> int:
    """The bytes of an optimizer's state for parameters, on their own devices."""
    return bytes_of(
        distinct(
            value
            for parameter in parameters
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, Tensor) and value.device == parameter.device
        )
    )


def _of_gpu(device: torch.device) -> tuple[int | None, int | None, int | None]:
    """The peak, the pools of graphs and the free bytes of a GPU; None for a CPU worker."""
    if device.type != "cuda":
        return None, None, None
    # Segments of torch's usual pool have an identity of zeros.
    pools = (
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and any(segment["segment_pool_id"])
    )
    return peak_bytes(device), sum(pools), torch.cuda.mem_get_info(device)[0]


def peak_bytes(device: torch.device) -> int | None:
    """The most that torch's allocator has had in use on a GPU; None for a CPU worker."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)

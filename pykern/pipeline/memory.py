"""The memory that each device of a pipeline holds, by what it is for."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..budget.fit_memory import most_held
from ..budget.level_costs import levels_of_stages
from ..budget.measure import measure
from ..plan import Kind
from ..runtime import microbatch
from ..runtime.loss import Losses
from ..runtime.recompute.recompute import LEVELS
from ..runtime.stage.stage import Stage
from ..tensors.parameters import num_bytes
from ..tensors.trees import Call
from .left_alone import left_alone
from .steps import Steps

if TYPE_CHECKING:
    from rich.table import Table

# Columns of the plain form.
WIDTH = 120


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
        graphs: the pools of captured graphs.
        peak: the most that torch's allocator has had in use on the GPU since the process began, or
            since `torch.cuda.reset_peak_memory_stats`.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: float | None
    transfers: int
    graphs: int | None
    peak: int | None


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all devices. Its string is a table in MiB, with a note for all that is unknown.

    Attributes:
        devices: what each holds.
        unknown: by name of a field that is None, why it is not known.
    """

    devices: Sequence[DeviceMemory]
    unknown: dict[str, str]

    def __str__(self) -> str:
        """The plain form, for logs and pipes."""
        from rich.console import Console  # noqa: PLC0415 - takes long

        out = io.StringIO()
        Console(file=out, width=WIDTH, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich__(self) -> Table:
        """The table, for a terminal."""
        from rich.table import Table  # noqa: PLC0415 - takes long

        names = [field.name for field in fields(DeviceMemory)]
        notes = [f"{name}: {why}" for name, why in self.unknown.items()]
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            caption="\n".join(notes) or None,
            caption_justify="left",
        )
        for name in ("device", *names):
            table.add_column(name, justify="right")
        for number, device in enumerate(self.devices):
            table.add_row(str(number), *(_in_mib(getattr(device, name)) for name in names))
        return table


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
        with left_alone([pipe, pipe._loss_fn], [s.device for s in pipe._executor.stages]):
            activations = activation_bytes(pipe, call, target)
        if activations is None:
            unknown["activations"] = "not predicted for arguments by name."
    if optimizer is None:
        unknown["optimizer"] = "a pipeline does not know it. Give memory(optimizer=...)."
    driver, stages = pipe._executor.driver, pipe._executor.stages
    if driver.captures:
        unknown["graphs"] = "torch does not tell the size of a graph's pool."
    devices = []
    for device in range(pipe.plan.num_devices):
        homes = pipe.plan.placement.replicas
        here = [stage for stage in stages if any(of[stage.index] == device for of in homes)]
        devices.append(
            DeviceMemory(
                *parameter_bytes(here),
                optimizer=None if optimizer is None else _state_bytes(here, optimizer),
                activations=None if activations is None else activations[device],
                transfers=driver.transfer_bytes(device),
                graphs=None if driver.captures else 0,
                peak=_peak_bytes(driver.device(device)),
            )
        )
    if any(device.peak is None for device in devices):
        unknown["peak"] = "not measured on CPU workers, which share the memory of the process."
    return MemoryReport(devices, unknown)


def parameter_bytes(stages: Iterable[Stage]) -> tuple[int, int, int]:
    """The bytes of parameters, of buffers, and of gradients of the parameters that train."""
    layers = [layer for stage in stages for layer in stage.originals]
    parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
    buffers = {id(b): b for layer in layers for b in layer.buffers()}.values()
    trained = [p for p in parameters if p.requires_grad]
    return (
        sum(map(num_bytes, parameters)),
        sum(map(num_bytes, buffers)),
        sum(map(num_bytes, trained)),
    )


def activation_bytes(pipe: Steps, call: Call, target: Any) -> list[float] | None:
    """By device, the predicted peak of activations; None if the first layer gets names."""
    plan, stages = pipe.plan, pipe._executor.stages
    levels = levels_of_stages(plan.num_stages, pipe._levels)
    named = {level for one in levels for level in (one.kept, one.rebuilt)}
    (args, kwargs), of_target = first_microbatch(pipe, call, target)
    if kwargs:
        return None
    assert pipe._loss_fn is not None
    losses = Losses(pipe._loss_fn, None if of_target is None else [of_target], [1.0])
    chosen = [level for level in LEVELS if level in named]
    costs = measure(stages, args, losses, chosen, split=plan.has(Kind.I), timed=False)
    return most_held(plan, costs, levels)


def first_microbatch(pipe: Steps, call: Call, target: Any) -> tuple[Call, Any]:
    """The first microbatch, which is as large as any other, as the first stage takes it."""
    rows = pipe._rows(call, target)
    part, of_target = microbatch.split((call, target), rows)[0]
    return pipe._chain.enter(*part), of_target


def _state_bytes(stages: Sequence[Stage], optimizer: Optimizer) -> int:
    """The bytes of an optimizer's state for the parameters of stages, on their own devices."""
    kept: dict[int, Tensor] = {}
    for stage in stages:
        for parameter in (p for layer in stage.originals for p in layer.parameters()):
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and value.device == parameter.device:
                    kept[id(value)] = value
    return sum(map(num_bytes, kept.values()))


def _peak_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)


def _in_mib(held: float | None) -> str:
    return "unknown" if held is None else f"{held / 2**20:.3f}"

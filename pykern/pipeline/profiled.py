"""Runs steps of a pipeline for a profile, and measures what its report needs beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor, nn

from ..budget.fit_memory import held_by_action, most_held
from ..budget.level_costs import StageCosts, StageLevel
from ..cgroup import usable_cores
from ..modes import torch_threads
from ..partition.chain import max_stages
from ..partition.profile import FirstArguments, layer_times_ns
from ..plan import Kind, Plan, require_counts
from ..plan.costs import by_stage
from ..profiling import Observed, Report, report_of
from ..profiling.causes import gaps_on_path
from ..profiling.observed import OtherPlan
from ..runtime import microbatch
from ..runtime.loss import Loss
from ..tensors.parameters import bytes_of, gradient_bytes, held_by
from ..tensors.trees import Call, all_tensors
from ..trace.cut_tape import Environment
from .choose_plan import choose_plan
from .host_waits import host_waits_of
from .left_alone import left_alone
from .memory import args_and_loss, first_microbatch, held_by_stages, peak_bytes
from .request import Request
from .steps import Steps
from .timed_steps import core_share, costs_of, hidden, middle, timed_steps

# Steps of pipelines without work.
EMPTY_STEPS = 10

# Makes a pipeline from layers and arguments by name.
MakePipeline = Callable[..., Steps]


def other_plans(asked: Request) -> OtherPlan:
    """A function that makes other plans for the model of a request, and keeps no more of it."""
    schedule, options, shares = asked.schedule, asked.options, asked.shares
    num_layers = max_stages(asked.model)
    joined = asked.process_group is not None or asked.tensor_parallel is not None

    def make(name: str | None, num_microbatches: int) -> Plan:
        of = replace(shares, num_microbatches=num_microbatches)
        if name is None:
            return choose_plan(schedule, of, num_layers, options, joined)
        return choose_plan(name, of, num_layers, {}, joined)

    return make


def profile(
    pipe: Steps,
    make: MakePipeline,
    make_plan: OtherPlan,
    call: Call,
    target: Any,
    num_steps: int,
) -> Report:
    """Runs steps, and says why they take their time. See `Pipeline.profile`."""
    require_counts(steps=num_steps)
    on_cpu = pipe._executor.in_one_memory
    devices = [stage.device for stage in pipe._executor.stages]
    threads = torch.get_num_threads()

    def step() -> None:
        pipe.step(*call[0], target=target, **call[1])

    with left_alone([pipe, pipe._loss_fn], devices, (call, target)):
        competing = on_cpu and threads > 1
        ran, alone = timed_steps(pipe, step, num_steps, competing=competing)
        quiet, peaks = alone or ran, _peaks(pipe)
        layer_ns: Sequence[float] = ()
        beside: dict[str, Any] = {}
        if on_cpu:
            with torch_threads(1):
                layer_ns = _layer_ns(pipe, call, target)
                beside = _beside_layers(make, pipe.plan.num_devices)
        looks = not on_cpu and torch.cuda.is_initialized()
        waits = host_waits_of(step) if looks else ()
        flops = _flops(pipe, call, target)
        of_stages = held_by_stages(pipe, call, target)
    seen = Observed(
        plan=pipe.plan,
        timeline=middle(ran),
        costs=costs_of(ran, pipe.plan.num_stages),
        make_plan=make_plan,
        step_ns=median_low(one.took_ns for one in ran),
        num_steps=num_steps,
        rows=microbatch.batch_size({"inputs": call[0], "named": call[1]}),
        tokens_of_row=tokens_of_row(call),
        spans=pipe.partition.stages,
        layer_names=pipe.partition.layer_names,
        layer_ns=layer_ns,
        **beside,
        one_thread=middle(alone) if alone else None,
        one_thread_costs=costs_of(alone, pipe.plan.num_stages) if alone else None,
        torch_threads=threads,
        num_cores=usable_cores() if on_cpu else None,
        captures=pipe._executor.driver.captures,
        host_waits=waits,
        core_share=core_share(quiet),
        **({} if of_stages is None else _held_bytes(pipe, *of_stages)),
        peak_bytes=peaks,
        flops=flops,
        hidden_copies=hidden(ran),
    )
    return report_of(seen)


def _peaks(pipe: Steps) -> list[int]:
    """By device, the peak that was measured on its GPU; empty for CPU workers."""
    driver = pipe._executor.driver
    found = (peak_bytes(driver.device(device)) for device in range(pipe.plan.num_devices))
    return [peak for peak in found if peak is not None]


class _LossLayer(nn.Module):
    """The loss as the last layer of a chain."""

    def __init__(self, loss: Loss, target: Any) -> None:
        super().__init__()
        self.loss, self.target = loss, target

    def forward(self, output: Any) -> Tensor:
        """The loss of an output."""
        return self.loss(output) if self.target is None else self.loss(output, self.target)


def _layer_ns(pipe: Steps, call: Call, target: Any) -> list[float]:
    """The times of the layers, with the loss in the last; empty if any takes arguments by name."""
    (args, kwargs), of_target = first_microbatch(pipe, call, target)
    if kwargs:
        return []
    given = (one.in_one_stage() if isinstance(one, Environment) else one for one in args)
    first = FirstArguments(tuple(given))
    assert pipe._loss_fn is not None
    loss = _LossLayer(pipe._loss_fn, of_target)
    with warnings.catch_warnings():
        # A profile says itself how much times vary.
        warnings.filterwarnings("ignore", "the times of layers differ")
        times = layer_times_ns([*pipe._chain.layers.values(), loss], first)
    return [*times[:-2], times[-2] + times[-1]]


def _beside_layers(make: MakePipeline, num_devices: int) -> dict[str, Any]:
    """The time of actions and gaps in a pipeline whose layers do next to nothing."""
    wholes, issue_ns, hand_over_ns = _empty(make, num_devices, "one_f_one_b", (Kind.F, Kind.B))
    halves, *_ = _empty(make, num_devices, "zb_h1", (Kind.I, Kind.W))
    # The first stage does all in its W.
    half = sum(halves.values()) / 2
    action_ns = {**wholes, Kind.I: half, Kind.W: half}
    return {"action_ns": action_ns, "issue_ns": issue_ns, "hand_over_ns": hand_over_ns}


def _empty(
    make: MakePipeline, num_devices: int, schedule: str, kinds: Sequence[Kind]
) -> tuple[dict[Kind, float], float, float]:
    """The times of actions by kind, and of gaps behind the same device and others: medians."""
    times: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    issue, hand_over = [0.0], [0.0]
    with make(
        [nn.Linear(1, 1, device="cpu") for _ in range(num_devices)],
        devices=f"cpu:{num_devices}",
        schedule=schedule,
        microbatches=2 * num_devices,
        loss_fn=torch.sum,
    ) as pipe:
        for _ in range(EMPTY_STEPS):
            pipe.step(torch.ones(2 * num_devices, 1, device="cpu"))
            costs, gaps = pipe.costs(), gaps_on_path(pipe.plan, pipe.timeline())
            issue += gaps[0]
            hand_over += gaps[1]
            for kind in kinds:
                times[kind] += by_stage(costs, kind, num_devices)
    return {kind: median(of) for kind, of in times.items()}, median(issue), median(hand_over)


def _flops(pipe: Steps, call: Call, target: Any) -> int | None:
    """The operations of a step, in proportion to those of its first microbatch."""
    from ..budget.flops import microbatch_flops  # noqa: PLC0415 - torch's counter imports Triton

    first, rows = args_and_loss(pipe, call, target), pipe._rows(call, target)
    if first is None:
        return None
    return microbatch_flops(pipe._executor.stages, *first) * sum(rows) // rows[0]


def _held_bytes(
    pipe: Steps, costs: Sequence[StageCosts], levels: Sequence[StageLevel]
) -> dict[str, Any]:
    """By device, the predicted peak of parameters, gradients and activations; and by action."""
    held = most_held(pipe.plan, costs, levels)
    for homes in pipe.plan.placement.replicas:
        for stage, device in zip(pipe._executor.stages, homes, strict=True):
            parameters, buffers, trained = held_by(stage.originals)
            held[device] += bytes_of([*parameters, *buffers]) + gradient_bytes(trained)
    return {"held_bytes": held, "held_by_action": held_by_action(pipe.plan, costs, levels)}


def tokens_of_row(call: Call) -> int | None:
    """The number of tokens in a row; None if the first input does not have rows of integers."""
    first: list[Tensor] = all_tensors(call)[:1]
    is_text = first and first[0].dim() == 2 and not first[0].is_floating_point()
    return first[0].size(1) if is_text else None

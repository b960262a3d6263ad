"""The part of each process in the tests of plans on torch's runtime, and the expected results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from pykern.interop.torch_runtime import PlanSchedule
from pykern.plan import Kind, Plan

WIDTH = 6
ROWS_PER_MICROBATCH = 2
CPU = torch.device("cpu")

Gradients = dict[str, Tensor]


def make_model(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for _ in range(num_stages)
    ]


def make_batch(num_microbatches: int, seed: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    shape = (num_microbatches * ROWS_PER_MICROBATCH, WIDTH)
    return torch.randn(shape), torch.randn(shape)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def stages_of(rank: int, plan: Plan, model: Sequence[nn.Module], group: Any = None) -> list[Any]:
    """This process's stages, without shapes: torch asks the modules for them."""
    return [
        PipelineStage(model[index], index, plan.num_stages, CPU, group=group)
        for index, device in enumerate(plan.placement.replicas[0])
        if device == rank
    ]


def step(schedule: PlanSchedule, batch: tuple[Tensor, Tensor], **options: Any) -> Any:
    """A step of a whole batch, each process giving what is asked of it."""
    stages = [stage.stage_index for stage in schedule._stages]
    return schedule.step(
        *((batch[0],) if 0 in stages else ()),
        target=batch[1] if schedule._num_stages - 1 in stages else None,
        **options,
    )


def gradients_of(rank: int, plan: Plan, model: Sequence[nn.Module]) -> Gradients:
    return {
        f"{index}.{name}": parameter.grad
        for index, device in enumerate(plan.placement.replicas[0])
        if device == rank
        for name, parameter in model[index].named_parameters()
        if parameter.grad is not None
    }


def several(rank: int, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Functions of the rank and further arguments, one after another: processes take seconds."""
    return [function(rank, *arguments) for function, *arguments in jobs]


def train(
    rank: int, plans: Sequence[Plan], scale_grads: bool = True, num_frozen: int = 0
) -> list[tuple[Gradients, list[Tensor], Tensor | None]]:
    """Gradients, losses and outputs of two steps by each plan, the second on top of the first."""
    found = []
    for plan in plans:
        model = make_model(plan.num_stages)
        for stage in model[:num_frozen]:
            stage.requires_grad_(False)
        schedule = plan.to_torch(
            stages_of(rank, plan, model), loss_fn=loss_of, scale_grads=scale_grads
        )
        losses: list[Tensor] = []
        step(schedule, make_batch(plan.num_microbatches, seed=8), return_outputs=False)
        output = step(schedule, make_batch(plan.num_microbatches, seed=9), losses=losses)
        found.append((gradients_of(rank, plan, model), losses, output))
    return found


def evaluate(rank: int, plan: Plan) -> tuple[list[Any], Gradients]:
    """Outputs and losses of evaluations before and after a step, without and with targets."""
    model = make_model(plan.num_stages)
    schedule = plan.to_torch(stages_of(rank, plan, model), loss_fn=loss_of)
    batch, target = make_batch(plan.num_microbatches)
    first = (batch,) if rank == plan.placement.device_of(0) else ()
    is_last = rank == plan.placement.device_of(plan.num_stages - 1)
    losses: list[Tensor] = []
    with torch.no_grad():
        found = [schedule.eval(*first)]
    step(schedule, (batch, target))
    with torch.no_grad():
        found.append(schedule.eval(*first, target=target if is_last else None, losses=losses))
    return [*found, losses], gradients_of(rank, plan, model)


def expected(plan: Plan, scale: int, seeds: Sequence[int] = (8, 9)) -> Gradients:
    """The gradients of the plain model, microbatch by microbatch, each stage in its own order."""
    total: Gradients = {}
    for seed in seeds:
        parts = [
            gradients_of_microbatch(plan, scale, seed, m) for m in range(plan.num_microbatches)
        ]
        for stage in range(plan.num_stages):
            for microbatch in backward_order(plan, stage):
                for name, gradient in parts[microbatch].items():
                    if name.startswith(f"{stage}."):
                        total[name] = total[name] + gradient if name in total else gradient
    return total


def gradients_of_microbatch(plan: Plan, scale: int, seed: int, microbatch: int) -> Gradients:
    model = nn.Sequential(*make_model(plan.num_stages))
    batch, target = make_batch(plan.num_microbatches, seed)
    count = plan.num_microbatches
    output = model(batch.chunk(count)[microbatch])
    (loss_of(output, target.chunk(count)[microbatch]) / scale).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def backward_order(plan: Plan, stage: int) -> list[int]:
    """The microbatches in the order in which the stage's weights get their gradients."""
    return [
        action.microbatch
        for row in plan.rows
        for action in row
        if action.stage == stage and action.kind in (Kind.B, Kind.W)
    ]

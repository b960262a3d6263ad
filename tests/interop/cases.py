"""One script for both libraries: stages, a schedule, a step, and what is there afterwards."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from pykern.interop import pipelining

WIDTH = 6
CPU = torch.device("cpu")

# The classes that torch runs in one process.
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
MULTI = (*LOOPED, *V_SHAPED)
SINGLE = ("GPipe", "1F1B")


@dataclass(frozen=True)
class Library:
    """Where the names come from.

    Attributes:
        names: the module that has them.
        schedule: finds a schedule class by name.
    """

    names: Any
    schedule: Callable[[str], Any]


TORCH = Library(torch.distributed.pipelining, torch_schedules.get_schedule_class)
OURS = Library(pipelining, pipelining.get_schedule_class)


@dataclass
class Outcome:
    """The results of a step."""

    output: Any
    losses: list[Tensor]
    gradients: list[Tensor | None]


def parts(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(num_stages)
    ]


def batch(num_rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(8)
    return torch.randn(num_rows, WIDTH).double(), torch.randn(num_rows, WIDTH).double()


def loss_fn(output: Any, target: Tensor, power: int = 2) -> Tensor:
    return ((output - target) ** power).mean()


def make(
    library: Library, name: str, modules: Sequence[nn.Module], count: int = 4, **options: Any
) -> Any:
    """The schedule of that name over these modules, for `count` microbatches."""
    stages = [
        library.names.PipelineStage(module, index, len(modules), CPU)
        for index, module in enumerate(modules)
    ]
    return library.schedule(name)(stages, count, **({"loss_fn": loss_fn} | options))


def step(
    library: Library,
    name: str,
    modules: Sequence[nn.Module],
    *args: Any,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Outcome:
    """One step of copies of the modules."""
    copied = deepcopy(list(modules))
    losses: list[Tensor] = []
    output = make(library, name, copied, **(options or {})).step(*args, losses=losses, **kwargs)
    return Outcome(output, losses, gradients_of(copied))


def gradients_of(modules: Sequence[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def num_stages_of(name: str) -> int:
    """In one process torch's V-shaped schedules have two stages."""
    return 2 if name in V_SHAPED else 4


def expect_same(ours: Outcome, theirs: Outcome) -> None:
    assert len(ours.losses) == len(theirs.losses) > 0
    assert len(ours.gradients) == len(theirs.gradients) > 0
    close(ours.output, theirs.output)
    close(ours.losses, [loss.detach() for loss in theirs.losses])
    close(ours.gradients, theirs.gradients)


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

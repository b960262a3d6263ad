"""The matrix: every model on every schedule with every number of devices and microbatches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from pykern.search import auto

from . import attention, flow, programs, recurrent, structures, training, vision
from .case import ROWS, Case
from .oracle import Plain, equal, loss_of_parts, plain_forward

# Updates within a step, and slices, need an executor that is not there yet.
NOT_YET = {"pipedream", "pipedream_2bw", "seq1f1b"}
SCHEDULES = sorted(schedules.by_name.keys() - NOT_YET)
DEVICES = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 5, 8)

ZOO: dict[str, Callable[[], Case]] = {
    name: make
    for kind in (vision, attention, recurrent, structures, training, flow, programs)
    for name, make in kind.CASES.items()
}

NUM_STEPS = 2


@dataclass(frozen=True)
class Cell:
    """One of the matrix."""

    model: str
    schedule: str
    num_devices: int
    num_microbatches: int

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}-{self.num_devices}-{self.num_microbatches}"

    @property
    def plan(self) -> Plan | None:
        """None where the schedule does not take these counts."""
        return _plan(self.schedule, self.num_devices, self.num_microbatches)

    def check(self, kind: str = "cpu") -> None:
        """Asserts that loss, gradients, buffers and random numbers are the plain model's.

        Args:
            kind: of devices, "cpu" or "cuda".
        """
        plan = self.plan
        assert plan is not None
        case = make(self.model)
        if plan.placement.num_replicas > 1 and case.refuses_replicas is not None:
            with pytest.raises(ValueError, match=case.refuses_replicas):
                pipeline(case, plan, kind)
            return
        with pipeline(case, plan, kind) as pipe:
            if self.schedule == "forward_only":
                _check_forward(self, case, pipe)
            else:
                _check_steps(self, case, pipe, plan)

    def check_outside(self, kind: str = "cpu") -> None:
        """Likewise for one step whose loss is computed outside, and its backward.

        Args:
            kind: of devices.
        """
        plan = self.plan
        assert plan is not None
        case = make(self.model)
        with pipeline(case, plan, kind) as pipe:
            starts = _starts(case, pipe) if case.draws or case.ties else ()
            torch.manual_seed(7)
            output = pipe(*case.args, **case.kwargs)
            loss = loss_of_parts(case, output, self.num_microbatches)
            loss.backward()
            found = _result(pipe, [])
            expected = _plain(self.model, self.num_microbatches, starts, 1, num_steps=1)
            _require_same(found, expected)


@dataclass(frozen=True)
class Result:
    """The results of steps."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor


def cells_of(model: str, schedule: str) -> Iterator[Cell]:
    """Those that there are."""
    for num_devices in DEVICES:
        for num_microbatches in MICROBATCHES:
            cell = Cell(model, schedule, num_devices, num_microbatches)
            if cell.plan is not None:
                yield cell


def make(model: str) -> Case:
    """The same model, with the same data, every time."""
    torch.manual_seed(len(model))
    return ZOO[model]()


@cache
def _plan(schedule: str, num_devices: int, num_microbatches: int) -> Plan | None:
    if schedule == "searched":
        found = auto(num_devices, num_microbatches, budget_ms=2, max_chunks=2, loss="outside")
        return found.plan
    with contextlib.suppress(ValueError):
        return schedules.by_name[schedule](num_devices, num_microbatches)
    return None


def pipeline(case: Case, plan: Plan, kind: str, **options: Any) -> pykern.Pipeline:
    """A pipeline of the case, for devices of that kind."""
    rows = -(-ROWS // plan.num_microbatches)
    gpus = [f"cuda:{number}" for number in range(plan.num_devices)]
    at = [len(case.starts) * stage // plan.num_stages for stage in range(1, plan.num_stages)]
    return pykern.Pipeline(
        case.model,
        devices=gpus if kind == "cuda" else f"cpu:{plan.num_devices}",
        schedule=plan,
        loss_fn=case.loss_fn,
        sample=case.sample(rows),
        split_at=[case.starts[number] for number in at] if case.starts else None,
        **options,
    )


def _check_steps(cell: Cell, case: Case, pipe: pykern.Pipeline, plan: Plan) -> None:
    starts = _starts(case, pipe) if case.draws or case.ties else ()
    expected = _plain(cell.model, cell.num_microbatches, starts, plan.placement.num_replicas)
    torch.manual_seed(7)
    losses = [pipe.step(*case.args, target=case.target, **case.kwargs) for _ in range(NUM_STEPS)]
    found = _result(pipe, losses)
    assert equal(found.losses, expected.losses)
    _require_same(found, expected)


def _require_same(found: Result, expected: Result) -> None:
    for name, gradient in expected.gradients.items():
        assert equal(found.gradients[name], gradient), name
    assert found.gradients.keys() == expected.gradients.keys()
    assert equal(found.buffers, expected.buffers)
    assert torch.equal(found.random_state, expected.random_state)


def _starts(case: Case, pipe: pykern.Pipeline) -> tuple[str, ...]:
    names: Sequence[str] = pipe.partition.layer_names
    if isinstance(case.model, nn.Sequential):
        names = list(case.model._modules)
    return tuple(names[span.start] for span in pipe.partition.stages)


@lru_cache(maxsize=64)
def _plain(
    model: str,
    num_microbatches: int,
    starts: tuple[str, ...],
    num_replicas: int,
    *,
    num_steps: int = NUM_STEPS,
) -> Result:
    case = make(model)
    plain = Plain(case, num_microbatches, starts, num_replicas)
    torch.manual_seed(7)
    return _result(case.model, [plain.step() for _ in range(num_steps)])


def _result(model: nn.Module, losses: list[Tensor]) -> Result:
    return Result(
        losses,
        {name: parameter.grad for name, parameter in model.named_parameters()},
        dict(model.named_buffers()),
        torch.get_rng_state(),
    )


def _check_forward(cell: Cell, case: Case, pipe: pykern.Pipeline) -> None:
    """Checks the forward of the model as it predicts."""
    plain = make(cell.model)
    if case.has_modes:
        pipe.eval()
        plain.model.eval()
    expected = plain_forward(plain, cell.num_microbatches)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert equal(pipe(*case.args, **case.kwargs), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(dict(pipe.named_buffers()), dict(plain.model.named_buffers()))

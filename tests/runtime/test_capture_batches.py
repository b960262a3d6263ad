"""Batches of captured steps: what a replay cannot do with one is done by calls."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import Case
from tests.runtime.test_capture import ROWS, captured, steps


class Times(nn.Module):
    """Multiplies with a factor that is given in one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor, factor: Any) -> Tensor:
        number = factor if isinstance(factor, float) else float(factor.sum())
        return self.linear(x) * number


class Holder:
    def sum(self) -> float:
        return 1.0


def times() -> Case:
    layers = nn.Sequential(Times(), nn.Linear(12, 12))
    return Case(layers, torch.randn(ROWS, 12), torch.randn(ROWS, 12), F.mse_loss)


def loss_of(case: Case, factor: float) -> Tensor:
    first, second = case.layers
    parts = [
        F.mse_loss(second(first(x, factor)), y) * 0.25
        for x, y in zip(case.inputs.split(4), case.target.split(4), strict=True)
    ]
    return sum(parts[1:], parts[0]).detach()


def test_gradients_of_the_batch_are_not_replayed(gpus: FakeCuda) -> None:
    case = times()
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(3):
            pipe.step(case.inputs, 1.0, target=case.target)
        launches = gpus.calls("cuGraphLaunch")
        inputs = case.inputs.clone().requires_grad_()
        with pytest.warns(UserWarning, match="are not what was captured") as given:
            pipe.step(inputs, 1.0, target=case.target)
        assert given[0].filename == __file__
        assert gpus.calls("cuGraphLaunch") == launches
        assert inputs.grad is not None
        pipe.step(case.inputs, 1.0, target=case.target)
        assert gpus.calls("cuGraphLaunch") > launches


@pytest.mark.parametrize("factor", [Holder(), np.ones(3)])
def test_objects_that_may_change_unseen_are_refused(gpus: FakeCuda, factor: Any) -> None:
    case = times()
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        pipe.step(case.inputs, factor, target=case.target)
        with pytest.raises(RuntimeError, match=f"holds a {type(factor).__name__}, which may"):
            pipe.step(case.inputs, factor, target=case.target)


def test_a_batch_that_requires_grad_is_refused(gpus: FakeCuda) -> None:
    case = times()
    case.inputs.requires_grad_()
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        pipe.step(case.inputs, 1.0, target=case.target)
        with pytest.raises(RuntimeError, match=r"of shape \(16, 12\), requires grad"):
            pipe.step(case.inputs, 1.0, target=case.target)
    case.inputs.grad = None


def test_numbers_in_a_batch_are_part_of_what_is_captured(gpus: FakeCuda) -> None:
    case = times()
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(3):
            pipe.step(case.inputs, 2.0, target=case.target)
        with pytest.warns(UserWarning, match="are not what was captured"):
            loss = pipe.step(case.inputs, 3.0, target=case.target)
        assert torch.equal(loss, loss_of(case, 3.0))
        assert torch.equal(pipe.step(case.inputs, 2.0, target=case.target), loss_of(case, 2.0))


class Returns(nn.Module):
    """Hands over its own memory, or what it was given, beside or in place of a result."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.constant = nn.Buffer(torch.full((12,), 0.5))
        self.what = what

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x[0] + x[1]
        y = self.linear(x)
        return {
            "input": lambda: x,
            "view": lambda: x.view(-1, 12),
            "twice": lambda: (y, y),
            "both": lambda: (y, x),
            "constant": lambda: (y, self.constant),
            "parameter": lambda: (y, self.linear.bias),
        }[self.what]()


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Any) -> Tensor:
        result: Tensor = self.linear(x if isinstance(x, Tensor) else x[0] * x[1])
        return result


@pytest.mark.parametrize("what", ["input", "view", "twice", "both", "constant", "parameter"])
def test_stages_may_hand_over_what_they_did_not_make(gpus: FakeCuda, what: str) -> None:
    layers = [nn.Linear(12, 12), Returns(what), Returns(what), Last()]
    case = Case(nn.Sequential(*layers), torch.randn(ROWS, 12), torch.randn(ROWS, 12), F.mse_loss)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.interleaved(2, 4, 2)) as pipe:
        steps(pipe, plain, case, 4)
        assert gpus.calls("cuGraphLaunch") > 0


class Branches(nn.Module):
    """Reads a value, and calls one function or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        function = torch.tanh if bool(x[0, 0] > 0) else torch.sin
        made: Tensor = self.second(function(self.first(x)))
        return made


def _branching(model: nn.Module, x: Tensor) -> pykern.Pipeline:
    return pykern.Pipeline(
        model,
        devices=["cuda:0", "cuda:1"],
        schedule=schedules.one_f_one_b(2, 4),
        loss_fn=F.mse_loss,
        sample=x[:4],
        split_at=["second"],
        capture=True,
    )


def _plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parts = [F.mse_loss(model(a), b) * 0.25 for a, b in zip(x.split(4), y.split(4), strict=True)]
    return sum(parts[1:], parts[0]).detach()


@pytest.mark.parametrize("signs", [(-1, -1, -1, -1), (1, -1, -1, -1)])
def test_another_branch_of_the_forward_is_not_replayed(
    gpus: FakeCuda, signs: tuple[int, ...]
) -> None:
    """All microbatches take it, or some."""
    model, x, y = Branches(), torch.rand(ROWS, 12) + 0.1, torch.randn(ROWS, 12)
    other = x * torch.tensor(signs).repeat_interleave(4)[:, None]
    with _branching(copy.deepcopy(model), x) as pipe:
        for _ in range(3):
            assert torch.equal(pipe.step(x, target=y), _plain_loss(model, x, y))
        launches = gpus.calls("cuGraphLaunch")
        assert launches > 0
        with pytest.warns(UserWarning, match="calls of the model's forward are not what was"):
            loss = pipe.step(other, target=y)
        assert torch.equal(loss, _plain_loss(model, other, y))
        assert gpus.calls("cuGraphLaunch") == launches
        assert torch.equal(pipe.step(x, target=y), _plain_loss(model, x, y))
        assert gpus.calls("cuGraphLaunch") > launches


def test_microbatches_of_two_branches_are_not_captured(gpus: FakeCuda) -> None:
    model, x, y = Branches(), torch.rand(ROWS, 12) + 0.1, torch.randn(ROWS, 12)
    with _branching(model, x) as pipe:
        x[:4] *= -1
        pipe.step(x, target=y)
        with pytest.raises(RuntimeError, match="the microbatches of one batch differs"):
            pipe.step(x, target=y)

"""Optimizers on the host: what fails, what is refused, and what is let go of."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern import AsyncPipeline, HostOptimizer
from tests.loop.loops import WIDTH, assert_same, batch, mlp, pipeline, plain_loop_step, twins


class _Stops(torch.optim.SGD):
    """Raises in the second of its steps."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls == 2:
            raise ValueError("planted")
        super().step()


def test_a_step_that_fails_leaves_whole_parameters() -> None:
    model, plain = twins(mlp())
    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, _Stops, lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        x, y = batch()
        pipe.step(x, target=y)
        plain_loop_step(plain, x, y)
        before = [p.detach().clone() for p in pipe.parameters()]
        with pytest.raises(ValueError, match="planted"):
            ours.step()
        theirs.step()
        stepped = [
            torch.equal(*pair) for pair in zip(pipe.parameters(), plain.parameters(), strict=True)
        ]
        kept = [torch.equal(*pair) for pair in zip(pipe.parameters(), before, strict=True)]
        # The last stage is stepped first.
        assert stepped == [False] * 2 + [True] * 4 or stepped == [False] * 4 + [True] * 2
        assert kept == [not one for one in stepped]
        for parameter, mirror in ours._mirrors.items():
            assert torch.equal(parameter, mirror.master)


def test_a_pipeline_step_that_fails_is_followed_by_right_ones() -> None:
    model, plain = twins(mlp())
    error = ValueError("planted")
    fails = False

    def stop(gradient: Tensor) -> None:
        if fails:
            raise error

    with pipeline(model) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.1)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        # The hook of the first stage runs when the last has streamed its gradients.
        next(iter(pipe.parameters())).register_hook(stop)
        for step in range(4):
            x, y = batch(7)
            fails = step == 1
            if fails:
                with pytest.raises(ValueError, match="planted"):
                    pipe.step(x, target=y)
                ours.zero_grad()
                continue
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            assert_same(pipe, plain)


def test_gradients_are_not_kept_alive() -> None:
    with pipeline(mlp()) as pipe:
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1)
        x, y = batch()
        pipe.step(x, target=y)
        gradients = [weakref.ref(p.grad) for p in pipe.parameters() if p.grad is not None]
        ours.zero_grad()
        gc.collect()
        assert not any(gradient() is not None for gradient in gradients)


def test_an_optimizer_that_is_gone_streams_nothing() -> None:
    with pipeline(mlp()) as pipe:
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1)
        part = weakref.ref(ours._parts[0])
        del ours
        gc.collect()
        assert part() is None
        x, y = batch()
        pipe.step(x, target=y)


def test_what_cannot_be_stepped_is_refused() -> None:
    with pipeline(nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), *mlp())) as pipe:
        with pytest.raises(
            TypeError,
            match="optimizer_class must step parameters one by one, got LBFGS, which looks at all "
            "at once",
        ):
            HostOptimizer(pipe, torch.optim.LBFGS)
        with pytest.raises(
            ValueError,
            match=r"parameters must be the pipeline's, got one of shape \(3,\) that is not",
        ):
            HostOptimizer(pipe, torch.optim.SGD, [nn.Parameter(torch.ones(3))], lr=0.1)
        model: Any = nn.Sequential(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="pipe must be a Pipeline, got a Sequential"):
            HostOptimizer(model, torch.optim.SGD, lr=0.1)
        with (
            AsyncPipeline(
                mlp(), devices="cpu:1", microbatches=1, optimizer=torch.optim.SGD
            ) as running,
            pytest.raises(TypeError, match="without an optimizer, got an AsyncPipeline"),
        ):
            HostOptimizer(running, torch.optim.SGD, lr=0.1)
        made: Any = torch.optim.SGD(pipe.parameters())
        with pytest.raises(
            TypeError, match="optimizer_class must be a class of optimizers, got an object of SGD"
        ):
            HostOptimizer(pipe, made)
        ours = HostOptimizer(pipe, torch.optim.SGD, lr=0.1)
        pipe.step(torch.arange(4), target=torch.zeros(4, WIDTH))
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        with pytest.raises(
            TypeError,
            match=r"gradients must be dense to go to the host, got layout .* for a parameter of "
            r"shape \(9, 8\)",
        ):
            ours.step()
        assert all(map(torch.equal, pipe.parameters(), before))
        with pytest.raises(TypeError, match="belongs to a pipeline"):
            copy.deepcopy(ours)

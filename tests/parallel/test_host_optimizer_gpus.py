"""An optimizer on the host beside GPUs, on the fake driver: its copies and who waits for them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from pykern import HostOptimizer
from pykern.plan import Kind
from tests.fake_cuda.beside import End
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus, host_gpus, unchecked_gpus
from tests.loop.loops import assert_same, batch, mlp
from tests.support.pipelines import small

DEVICES = ["cuda:0", "cuda:1"]


@pytest.fixture
def two_gpus() -> Iterator[FakeCuda]:
    with host_gpus(2) as fake:
        yield fake


def pipeline(model: nn.Sequential, **options: Any) -> pykern.Pipeline:
    return small(model, **({"devices": DEVICES, "microbatches": 4} | options))


def train(
    pipe: pykern.Pipeline,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype = torch.float32,
    steps: int = 6,
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """With an accumulation over two steps, and clipping in every third."""
    torch.manual_seed(7)
    for step in range(steps):
        x, y = batch(8)
        before_step()
        pipe.step(x.to(dtype), target=y.to(dtype))
        if step == 1:
            continue
        if step % 3 == 2:
            pykern.clip_grad_norm_(pipe.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1", "chimera"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_cpu_workers(
    two_gpus: FakeCuda, schedule: str, dtype: torch.dtype
) -> None:
    model = mlp(8).to(dtype)
    plain = copy.deepcopy(model)

    def copy_parameters() -> None:
        """Torch copies those of a replica to its GPU, for which streams wait for each other."""
        if schedule == "chimera":
            first, second = (gpus_of(pipe).current(gpu) for gpu in range(2))
            two_gpus.order(first, second)
            two_gpus.order(second, first)

    with pipeline(model, schedule=schedule) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        train(pipe, ours, dtype, before_step=copy_parameters)
        with pipeline(plain, schedule=schedule, devices="cpu:2") as other:
            is_half = dtype == torch.bfloat16
            theirs = HostOptimizer(other, torch.optim.AdamW, lr=0.01) if is_half else None
            train(other, theirs or torch.optim.AdamW(other.parameters(), lr=0.01), dtype)
            assert_same(pipe, other)


def gpus_of(pipe: pykern.Pipeline) -> HostGpus:
    driver: Any = pipe._executor.driver
    assert isinstance(driver.gpus, HostGpus)
    return driver.gpus


def test_captured_steps_are_copied_when_they_are_stepped(two_gpus: FakeCuda) -> None:
    """A replay writes to gradients and tells nobody."""
    model = mlp(8)
    plain = copy.deepcopy(model)
    with pipeline(model, capture=True) as pipe:
        ours = HostOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        assert not pipe.plan.has(Kind.REDUCE)
        with pipeline(plain, devices="cpu:2") as other:
            theirs = torch.optim.AdamW(other.parameters(), lr=0.01)
            for _ in range(4):
                x, y = batch(8)
                for one, optimizer in ((pipe, ours), (other, theirs)):
                    one.step(x, target=y)
                    optimizer.step()
                    for parameter in one.parameters():
                        assert parameter.grad is not None
                        parameter.grad.zero_()
            assert all(map(torch.equal, pipe.parameters(), other.parameters()))


@pytest.mark.parametrize("missing", ["join", "wait"])
def test_a_wait_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Here, or nobody would see it elsewhere."""
    with unchecked_gpus(2) as fake:
        pipe = pipeline(mlp(8))
        optimizer = HostOptimizer(pipe, torch.optim.SGD, lr=0.1)
        if missing == "wait":
            monkeypatch.setattr(End, "wait", lambda self: None)
        else:
            monkeypatch.setattr(HostGpus, "join_beside", lambda self: None)
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        train(pipe, optimizer, steps=3)
        wrong = [p for p in pipe.parameters() if not p.isfinite().all()]
        unchanged = [p for p, b in zip(pipe.parameters(), before, strict=True) if p.equal(b)]
        pipe.close()
        assert fake.violations or wrong or unchanged

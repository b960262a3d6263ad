"""An interrupt of what users call leaves the modes of their thread as they were."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pykern
from pykern import checkpoint
from pykern.optimizers.clipping import clip_grad_norm_
from tests.diagonal import nightly
from tests.interrupts import Interrupt, modes


def loading(folder: Path) -> Callable[[], object]:
    model = nn.Linear(2, 2)
    checkpoint.save(folder / "run.ckpt", model)
    return lambda: checkpoint.load(folder / "run.ckpt", model)


def construction(_: Path) -> Callable[[], object]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    budget = pykern.Budget(1e9, sample=torch.ones(1, 2))
    options = {"devices": "cpu:2", "microbatches": 2, "recompute": budget}
    return lambda: pykern.Pipeline(model, loss_fn=torch.Tensor.mean, **options).close()  # type: ignore[arg-type]


def clipping(_: Path) -> Callable[[], object]:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return lambda: clip_grad_norm_([parameter], 1.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "stride"),
    [(loading, 31), (construction, 801), (clipping, 1), nightly(loading, 3)],
)
def test_an_interrupt_leaves_the_modes_of_the_thread(
    tmp_path: Path, make: Callable[[Path], Callable[[], object]], stride: int
) -> None:
    act, before = make(tmp_path), modes()
    for number in itertools.count(step=stride):
        with Interrupt(number) as interrupt:
            try:  # noqa: SIM105 - lines of `suppress` are interrupted as well
                act()
            except KeyboardInterrupt:
                pass
        if not interrupt.where:
            break
        assert modes() == before, interrupt.where
    assert number > 10

"""Optimizers and schedulers of every kind go on from a file as from their own state."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from tests.checkpoint.runs import same

Make = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw_fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw_tensor_lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "muon": lambda p: optim.Muon([each for each in p if each.dim() == 2], lr=0.1),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "groups": lambda p: optim.AdamW(
        [{"params": p[:1], "lr": 0.2, "betas": (0.5, 0.6)}, {"params": p[1:], "weight_decay": 0.0}]
    ),
}

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multi_step": lambda o: optim.lr_scheduler.MultiStepLR(o, [1, 1, 4]),
    "one_cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "cyclic": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "restarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o,
        [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
    "chained": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.LinearLR(o), optim.lr_scheduler.StepLR(o, 2)]
    ),
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ckpt"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def train(net: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(5, 3, generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(x) - x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_file(file, name):
    first = model()
    before = OPTIMIZERS[name](list(first.parameters()))
    train(first, before)
    checkpoint.save(file, first, before)
    second = model()
    fresh = OPTIMIZERS[name](list(second.parameters()))
    checkpoint.load(file, second, fresh)
    assert same(fresh.state_dict(), before.state_dict())
    train(first, before)
    train(second, fresh)
    assert same(second.state_dict(), first.state_dict())
    assert same(fresh.state_dict(), before.state_dict())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_from_a_file(file, name):
    first, second = model(), model()
    before = optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULERS[name](before)
    train(first, before, schedule)
    checkpoint.save(file, first, before, scheduler=schedule)
    fresh = optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    anew = SCHEDULERS[name](fresh)
    checkpoint.load(file, second, fresh, scheduler=anew)
    assert anew.get_last_lr() == schedule.get_last_lr()
    train(first, before, schedule)
    train(second, fresh, anew)
    assert anew.get_last_lr() == schedule.get_last_lr()
    assert same(second.state_dict(), first.state_dict())


def test_a_plateau_whose_best_is_infinite_is_kept(file):
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    checkpoint.save(file, net, optimizer, scheduler=plateau)
    state = copy.deepcopy(plateau.state_dict())
    plateau.step(3.0)
    checkpoint.load(file, net, optimizer, scheduler=plateau)
    assert plateau.state_dict() == state
    assert plateau.best == float("inf")


def test_a_file_gives_functions_no_state(file):
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    scheduler = SCHEDULERS["lambda"](optimizer)

    class Decay:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __call__(self, epoch: int) -> float:
            return self.rate**epoch

    other = optim.lr_scheduler.LambdaLR(optimizer, Decay(0.5))
    checkpoint.save(file, net, scheduler=other)
    with pytest.raises(
        CheckpointError, match=r"lr_lambdas/0 must be None, as it is here, got {'rate': 0"
    ):
        checkpoint.load(file, net, scheduler=scheduler)
    decay = Decay(0.1)
    checkpoint.load(file, net, scheduler=optim.lr_scheduler.LambdaLR(optimizer, decay))
    assert decay.rate == 0.5


def test_state_is_found_by_name_in_whatever_order(file):
    first, second = model(), model()
    before = OPTIMIZERS["momentum"](list(first.parameters()))
    train(first, before)
    checkpoint.save(file, first, before)
    fresh = OPTIMIZERS["momentum"](list(second.parameters())[::-1])
    checkpoint.load(file, second, fresh)
    train(first, before)
    train(second, fresh)
    assert same(second.state_dict(), first.state_dict())


def test_lbfgs_in_another_order_is_refused(file):
    net = model()
    checkpoint.save(file, net, OPTIMIZERS["lbfgs"](list(net.parameters())))
    with pytest.raises(
        CheckpointError,
        match="must have its parameters in the order of the "
        "file, which LBFGS depends on, got another order",
    ):
        checkpoint.load(file, net, OPTIMIZERS["lbfgs"](list(net.parameters())[::-1]))


def test_how_the_update_is_computed_stays_and_its_settings_are_loaded(file):
    net = model()
    before = optim.AdamW(net.parameters(), lr=0.3, foreach=True)
    train(net, before)
    checkpoint.save(file, net, before)
    fresh = optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    checkpoint.load(file, net, fresh)
    assert fresh.param_groups[0]["lr"] == 0.3
    assert fresh.param_groups[0]["foreach"] is False


def test_what_an_optimizer_keeps_is_of_the_dtype_that_was_saved(file):
    """torch's own load_state_dict would make it that of the parameter."""
    net = model().bfloat16()
    optimizer = optim.SGD(net.parameters(), momentum=0.9)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.rand(parameter.shape)
    checkpoint.save(file, net, optimizer)
    fresh = optim.SGD(net.parameters(), momentum=0.9)
    checkpoint.load(file, net, fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert next(iter(fresh.state.values()))["momentum_buffer"].dtype == torch.float32

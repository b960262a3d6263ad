"""A file that does not fit is refused with a reason, and nothing has been changed then."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from pykern.checkpoint.dcp import from_dcp, to_dcp
from tests.checkpoint.runs import Run, adam, plain, same


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ckpt"


def expect_refused(file, run: Run, message: str, **parts: Any) -> None:
    """The same from the caller's side as if `load` had not been called."""
    before = run.states()
    grads = [parameter.grad for parameter in run.model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(file, **(run.parts() | parts))
    assert same(run.states(), before)
    assert all(p.grad is grad for p, grad in zip(run.model.parameters(), grads, strict=True))


def groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


def one_short(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters())[1:])


def with_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def with_layers(run: Run, start: int, stop: int, **others: nn.Module) -> nn.Sequential:
    """Some of the run's layers, and perhaps another before or after them."""
    kept = list(run.model.children())[start:stop]
    first, last = ([others[name]] if name in others else [] for name in ("first", "last"))
    return nn.Sequential(*first, *kept, *last)


# The parts that are loaded into, instead of those that were saved.
OTHERS: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "more layers": (
        lambda run: {"model": with_layers(run, 0, 8, last=nn.Linear(6, 6))},
        r"the model must have the same names in the file, got '8.bias', '8.weight' only here",
    ),
    "fewer layers": (
        lambda run: {"model": with_layers(run, 0, 7)},
        r"the model must have the same names in the file, got '7.bias', '7.weight' only in",
    ),
    "another shape": (
        lambda run: {"model": with_layers(run, 1, 8, first=nn.Linear(5, 6))},
        r"0.weight must be float32 \[6, 5\], as it is here, got float32 \[6, 6\] in the file",
    ),
    "another dtype": (
        lambda run: {"model": with_layers(run, 0, 7, last=nn.Linear(6, 6).double())},
        r"7.weight must be float64 \[6, 6\], as it is here, got float32 \[6, 6\] in the file",
    ),
    "another optimizer": (
        lambda run: {"optimizer": torch.optim.SGD(run.model.parameters())},
        "optimizer must be of the class that was saved, 'AdamW', got SGD",
    ),
    "other groups": (
        lambda run: {"optimizer": groups(run.model)},
        "the optimizer must have 2 groups, as it has here, got 1 in the file",
    ),
    "a parameter less": (
        lambda run: {"optimizer": one_short(run.model)},
        "group 0 of the optimizer must have the same names in the file, got '0.weight' only",
    ),
    "another scheduler": (
        lambda run: {"scheduler": with_steps(run.optimizer)},
        "the scheduler must have the same names in the file, got 'step_size' only here",
    ),
    "a scaler that is off": (
        lambda _: {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
        "the scaler must have the same names in the file, got .* and 2 more only in the file",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_from_the_run_that_was_saved_is_refused(file, name):
    saved = plain()
    saved.train(2)
    checkpoint.save(file, **saved.parts(), grads=True)
    other = plain()
    change, message = OTHERS[name]
    expect_refused(file, other, message, **change(other))


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "scaler", "rng"])
def test_what_the_file_does_not_hold_cannot_be_asked_for(file, part):
    run = plain()
    left_out = {part: False if part == "rng" else None}
    checkpoint.save(file, **(run.parts() | left_out))
    expect_refused(
        file, run, f"{part} must be in the file to be loaded, .* Load with {part}=", rng=True
    )
    checkpoint.load(file, **(run.parts() | left_out))


def test_random_states_stay_in_the_file_if_they_are_not_asked_for(file):
    run = plain()
    checkpoint.save(file, **run.parts())
    torch.rand(1), random.random(), np.random.uniform()
    before = run.states()
    checkpoint.load(file, **run.parts(), rng=False)
    assert same(run.states(), before)


def broken(change: Callable[[Run], object]) -> Run:
    run = plain()
    run.train(1)
    change(run)
    return run


def stranger(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))]})


def keep_globally(run: Run) -> None:
    run.optimizer.state["global"] = {}  # type: ignore[index]


def first_state(run: Run) -> dict[str, Any]:
    return run.optimizer.state[next(run.model.parameters())]


UNSAVABLE: dict[str, tuple[Callable[[Run], object], str]] = {
    "a foreign parameter": (
        stranger,
        r"the optimizer must train parameters of the model alone, got parameter 0 of "
        r"its group 1, float32 \[2, 3\], which is of another model",
    ),
    "state of no parameter": (
        keep_globally,
        "the optimizer must keep state for its own parameters, got state for 'global'",
    ),
    "an object": (
        lambda run: first_state(run).update(hook=print),
        r"optimizer/state/0.weight/hook must be a tensor, .*, got a builtin_function_or_method",
    ),
    "a set": (
        lambda run: run.optimizer.param_groups[0].update(names={1}),
        r"optimizer/param_groups/0/names must be a tensor, number, .*, got a set",
    ),
    "another shape": (
        lambda run: first_state(run).update(exp_avg=torch.ones(5)),
        r"the optimizer's exp_avg of 0.weight must have .* float32 \[6, 6\], got float32 \[5\]",
    ),
    "a numpy number": (
        lambda run: setattr(run.scheduler, "best", np.int64(3)),
        "scheduler/best must be a tensor, number, .*, got a int64",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_refused_by_name_before_anything_is_written(file, name):
    change, message = UNSAVABLE[name]
    run = broken(change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(file, **run.parts())
    assert list(file.parent.iterdir()) == []


def test_extra_that_is_no_data_is_refused(file):
    loop: list[object] = []
    loop.append(loop)
    for extra, message in (
        ({1.5: 2}, "keys of extra must be strings or ints, got 1.5"),
        ({"f": print}, "extra/f must be a tensor, number, .*, got a builtin_function_or_method"),
        ([2 << 20_000], "extra/0 must have ints of at most 4300 digits, got one of 20002 bits"),
        ({2 << 20_000: 1}, "extra must have ints of at most 4300 digits, got one of 20002 bits"),
        (loop, "extra must have at most .* levels, got more. A container may contain itself"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(file, nn.Linear(1, 1), extra=extra)
    assert list(file.parent.iterdir()) == []


def test_more_values_than_are_read_are_not_written(file, monkeypatch):
    model = nn.Linear(1, 1)
    checkpoint.save(file, model, extra=list(range(1000)))
    monkeypatch.setattr(checkpoint.file, "MAX_VALUES", 1000)
    with pytest.raises(CheckpointError, match="must have at most 1000 values"):
        checkpoint.load(file, model)
    with pytest.raises(
        CheckpointError,
        match=r"must fit in a file that can be read again, got .* must have at most .* values",
    ):
        checkpoint.save(file, model, extra=list(range(1000)), rng=False)
    checkpoint.save(file, model, extra=3, rng=False)
    assert checkpoint.load(file, model, rng=False) == 3


def test_a_scheduler_that_fails_by_itself_leaves_model_and_optimizer(file):
    class Failing(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("mine")

    run = plain()
    scheduler = Failing(run.optimizer, 2)
    checkpoint.save(file, run.model, run.optimizer, scheduler=scheduler)
    run.train(1)
    before = run.states()
    with pytest.raises(KeyError, match="mine"):
        checkpoint.load(file, run.model, run.optimizer, scheduler=scheduler)
    assert same(run.states(), before)


def test_rows_that_are_one_in_memory_are_not_loaded_into(file):
    model = nn.Module()
    model.register_buffer("x", torch.ones(1, 2).expand(3, 2))
    checkpoint.save(file, model)
    with pytest.raises(
        CheckpointError,
        match=r"x must have memory for each of its rows, got an "
        r"expanded tensor, which cannot be loaded into. Use "
        r"its clone\(\)",
    ):
        checkpoint.load(file, model)


def test_numpys_generator_of_another_kind_is_refused(file, monkeypatch):
    monkeypatch.setattr(np.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(
        CheckpointError,
        match=r"numpy's global generator must be MT19937, got "
        "'PCG64'. Save its state in extra, and call with "
        "rng=False",
    ):
        checkpoint.save(file, nn.Linear(1, 1))


def test_an_optimizer_of_ones_own_may_keep_what_it_likes(file):
    class Preconditioned(torch.optim.SGD):
        pass

    model = nn.Linear(3, 2)
    optimizer = Preconditioned(model.parameters())
    optimizer.state[model.weight] = {"axes": [torch.eye(2), torch.eye(3)], "count": 3}
    checkpoint.save(file, model, optimizer)
    fresh = Preconditioned(model.parameters())
    checkpoint.load(file, model, fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_run_that_went_on_is_brought_back(file):
    run = plain()
    run.train(2)
    there = run.states()
    checkpoint.save(file, **run.parts())
    run.train(1)
    run.optimizer = adam(run.model)
    run.scheduler = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 5])
    checkpoint.load(file, **run.parts())
    assert same(run.states(), there)


MISTAKEN: dict[str, tuple[Callable[[nn.Module], tuple[Any, ...]], str]] = {
    "a state": (
        lambda model: (model.state_dict(),),
        "model must be an nn.Module, got an object of OrderedDict. Give the model itself",
    ),
    "a class": (lambda model: (type(model),), "model must be an nn.Module, got the class Seq"),
    "an optimizer": (
        lambda model: (adam(model), model),
        "model must be an nn.Module, got an object of AdamW",
    ),
    "a scheduler": (
        lambda model: (model, with_steps(adam(model))),
        "optimizer must be an optimizer of torch.optim or like one, got an object of StepLR. Give",
    ),
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_what_is_no_model_or_optimizer_is_refused(file, name):
    """Python told of attributes that the object has not, such as a dict's `state_dict`."""
    model = nn.Sequential(nn.Linear(2, 2))
    make, message = MISTAKEN[name]
    for call in (checkpoint.save, checkpoint.load, to_dcp, from_dcp):
        with pytest.raises(TypeError, match=message):
            call(file, *make(model))
    assert not file.exists()


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.load])
@pytest.mark.parametrize("name", ["scheduler", "scaler"])
def test_what_has_no_state_is_refused_by_name(file, call, name):
    """Python told of attributes that the object has not."""
    model = nn.Sequential(nn.Linear(2, 2))
    for value, shown in ((0.1, "an object of float"), (torch.amp.GradScaler, "the class Grad")):
        with pytest.raises(TypeError, match=rf"{name} must have a state_dict\(\), got {shown}"):
            call(file, model, **{name: value})
    assert not file.exists()

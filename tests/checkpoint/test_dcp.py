"""The bridge to torch.distributed.checkpoint, in both directions, without a process group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from pykern.checkpoint import CheckpointError
from pykern.checkpoint.dcp import from_dcp, to_dcp
from tests.checkpoint.runs import pipelined, plain, same

# Torch's warning when it is called without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained(make: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def adam(model: nn.Module) -> Optimizer:
    """In two groups."""
    first, *others = model.parameters()
    groups: list[dict[str, object]] = [{"params": [first], "lr": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), momentum=0.9)


def stateless(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state that a program of torch's saves."""
    of_model, of_optimizer = distributed.get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer}


@pytest.mark.parametrize("make", [adam, momentum, stateless])
def test_what_pykern_writes_torch_reads(tmp_path, make):
    model, optimizer = trained(make)
    to_dcp(tmp_path, model, optimizer)
    other, fresh = trained(make)
    state = state_of(other, fresh)
    load(state, checkpoint_id=tmp_path, no_dist=True)
    distributed.set_state_dict(
        other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", [adam, momentum, stateless])
def test_what_torch_writes_pykern_reads(tmp_path, make):
    model, optimizer = trained(make)
    save(state_of(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    other, _ = trained(make)
    from_dcp(tmp_path, other, fresh := make(other))
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_run_goes_on_from_dcp_in_a_pipeline(tmp_path):
    run, pipeline = plain(), pipelined("cpu:3")
    run.train(2)
    to_dcp(tmp_path, run.model, run.optimizer)
    from_dcp(tmp_path, pipeline.model, pipeline.optimizer)
    state = pipeline.states()
    pipeline.close()
    assert same(state["model"], run.states()["model"])
    assert same(state["optimizer"], run.states()["optimizer"])


def test_a_model_alone_needs_no_optimizer(tmp_path):
    model, optimizer = trained(adam)
    to_dcp(tmp_path / "both", model, optimizer)
    to_dcp(tmp_path / "model", model)
    for folder in ("both", "model"):
        other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        from_dcp(tmp_path / folder, other)
        assert same(other.state_dict(), model.state_dict())
    with pytest.raises(
        CheckpointError,
        match=r"folder must hold 'optim', got .* without it. Name a folder that pykern wrote",
    ):
        from_dcp(tmp_path / "model", model, optimizer)


def test_lbfgs_comes_back_from_dcp(tmp_path: Path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    x = torch.randn(4, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    to_dcp(tmp_path, model, optimizer)
    other = nn.Linear(3, 2)
    from_dcp(tmp_path, other, fresh := torch.optim.LBFGS(other.parameters()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_what_does_not_fit_changes_nothing(tmp_path):
    model, optimizer = trained(adam)
    to_dcp(tmp_path, model, optimizer)
    other, another = trained(momentum)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(
        CheckpointError, match="the optimizer must have 1 groups, as it has here, got 2 in the file"
    ):
        from_dcp(tmp_path, other, another)
    assert same(dict(other.state_dict()), before)
    with pytest.raises(CheckpointError, match=r"'0.bias', '0.weight', '1.bias' and 6 more only in"):
        from_dcp(tmp_path, nn.Sequential())

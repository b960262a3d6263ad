"""Steps give what torch's own runtime gives, which runs them beside in one process."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from pykern.interop.pipelining import TensorChunkSpec
from tests.interop.cases import (
    LOOPED,
    MULTI,
    OURS,
    SINGLE,
    TORCH,
    WIDTH,
    batch,
    close,
    expect_same,
    loss_fn,
    make,
    num_stages_of,
    parts,
    step,
)

pytestmark = pytest.mark.usefixtures("_group_of_one")


def expect_alike(name: str, modules: list[nn.Module], *args: Any, **kwargs: Any) -> None:
    """A step of both libraries; one stage per device torch has in several processes only."""
    theirs = step(TORCH, "Interleaved1F1B" if name in SINGLE else name, modules, *args, **kwargs)
    expect_same(step(OURS, name, modules, *args, **kwargs), theirs)


@pytest.mark.parametrize("scale_grads", [True, False])
@pytest.mark.parametrize("name", [*SINGLE, *MULTI])
def test_a_step(name: str, scale_grads: bool) -> None:
    x, y = batch()
    options = {"scale_grads": scale_grads}
    expect_alike(name, parts(num_stages_of(name)), x, target=y, options=options)


class Two(nn.Module):
    """Takes and gives a value and a mask, which needs no gradient."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.last = last

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x = self.linear(x) * mask
        return x if self.last else [x, mask & (x > 0)]


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_several_values_between_stages(name: str) -> None:
    x, y = batch()
    expect_alike(name, [Two(), Two(), Two(), Two(last=True)], x, x > -1, target=y)


class Scaled(nn.Module):
    """Takes keyword arguments: a tensor for the microbatch and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, *, scale: Tensor, shift: float = 0.0) -> Tensor:
        return torch.tanh(self.linear(x)) * scale + shift


@pytest.mark.parametrize("name", [*SINGLE, *LOOPED])
def test_keyword_arguments(name: str) -> None:
    x, y = batch()
    scale = torch.linspace(0.5, 2.0, 8).double()[:, None]
    expect_alike(name, [Scaled() for _ in range(4)], x, target=y, scale=scale, shift=0.25)


class Turned(nn.Module):
    """Has its samples in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return (self.linear(x.T) * scale.T).T


def test_chunk_specs_and_merge_spec() -> None:
    x, y = batch()
    options = {
        "args_chunk_spec": (TensorChunkSpec(1),),
        "kwargs_chunk_spec": {"scale": TensorChunkSpec(1)},
        "output_merge_spec": TensorChunkSpec(1),
        "loss_fn": lambda output, target: loss_fn(output.T, target),
    }
    scale = torch.rand(WIDTH, 8).double()
    modules: list[nn.Module] = [Turned(), Turned()]
    expect_alike("Interleaved1F1B", modules, x.T, target=y, scale=scale, options=options)


def test_loss_kwargs() -> None:
    x, y = batch()
    expect_alike("1F1B", parts(4), x, target=y, loss_kwargs={"power": 4})


def in_one_stage(library: Any, modules: list[nn.Module], **options: Any) -> Any:
    """torch's eval, and its steps without a loss, fail where two stages are in one process."""
    stages = [nn.Sequential(*modules)] if library is TORCH else modules
    return make(library, "LoopedBFS", stages, **options)


def test_eval() -> None:
    x, y = batch()
    outcomes = []
    for library in (OURS, TORCH):
        losses: list[Tensor] = []
        modules = parts(4)
        with torch.no_grad():
            output = in_one_stage(library, modules).eval(x, target=y, losses=losses)
        assert all(parameter.grad is None for part in modules for parameter in part.parameters())
        outcomes.append([output, losses])
    close(*outcomes)


@pytest.mark.parametrize("library", [OURS, TORCH])
def test_without_a_loss_there_is_no_backward(library: Any) -> None:
    x, _ = batch()
    modules = parts(2)
    output = in_one_stage(library, modules, loss_fn=None).step(x)
    close(output.detach(), nn.Sequential(*modules)(x).detach())
    assert all(parameter.grad is None for part in modules for parameter in part.parameters())


@pytest.mark.parametrize("library", [OURS, TORCH])
def test_outputs_only_where_they_are_wanted(library: Any) -> None:
    x, y = batch()
    schedule = make(library, "LoopedBFS", parts(2))
    assert schedule.step(x, target=y, return_outputs=False) is None
    output = schedule.step(x, target=y)
    assert output.shape == x.shape
    assert not output.requires_grad


def test_gradients_reach_the_batch() -> None:
    x, y = batch()
    found = []
    for library in (OURS, TORCH):
        leaf = x.clone().requires_grad_()
        make(library, "Interleaved1F1B", parts(2), scale_grads=False).step(leaf, target=y)
        found.append(leaf.grad)
    close(*found)


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B"])
def test_a_batch_that_is_cut_already(name: str) -> None:
    x, y = batch()
    scale = torch.linspace(0.5, 2.0, 8).double()[:, None]
    modules: list[nn.Module] = [Scaled() for _ in range(4)]
    whole = step(OURS, name, modules, x, target=y, scale=scale, shift=0.25)
    cut: dict[str, Any] = {
        "arg_mbs": [(part,) for part in x.chunk(4)],
        "kwarg_mbs": [{"scale": part, "shift": 0.25} for part in scale.chunk(4)],
        "target_mbs": list(y.chunk(4)),
    }
    expect_same(step(OURS, name, modules, **cut), whole)
    if "arg_mbs" in inspect.signature(PipelineScheduleMulti.step).parameters:
        expect_alike(name, modules, **cut)

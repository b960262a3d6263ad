"""Layers without hooks are called by their forward; every hook is called as in the plain model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.profiler import profile

import pykern
from pykern.plan import Action, Kind, Placement, Plan
from pykern.torch_private.bare_calls import BareCalls, bare, bare_calls

WIDTH = 4


class Plain(nn.Linear):
    """A layer that nothing knows better than its forward does."""


class OwnCall(nn.Linear):
    """Its call does more than its forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


def nothing(*_: object) -> None:
    """A hook."""


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(nothing),
    "forward pre": lambda module: module.register_forward_pre_hook(nothing),
    "backward": lambda module: module.register_full_backward_hook(nothing),
    "backward pre": lambda module: module.register_full_backward_pre_hook(nothing),
    "forward of all": lambda _: torch_module.register_module_forward_hook(nothing),
    "forward pre of all": lambda _: torch_module.register_module_forward_pre_hook(nothing),
    "backward of all": lambda _: torch_module.register_module_full_backward_hook(nothing),
    "backward pre of all": lambda _: torch_module.register_module_full_backward_pre_hook(nothing),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_module_with_a_hook_is_called_itself(kind: str) -> None:
    layer = Plain(WIDTH, WIDTH)
    assert bare(layer) == layer.forward
    handle = HOOKS[kind](layer)
    try:
        assert bare(layer) is layer
    finally:
        handle.remove()
    assert bare(layer) == layer.forward


def test_a_module_whose_call_is_its_own_is_called_itself() -> None:
    layer = OwnCall(WIDTH, WIDTH)
    assert bare(layer) is layer
    assert bare(F.relu) is F.relu


def test_a_compiled_module_is_called_itself() -> None:
    layer = Plain(WIDTH, WIDTH)
    layer.compile(backend="eager")
    assert bare(layer) is layer
    wrapped = torch.compile(Plain(WIDTH, WIDTH), backend="eager")
    assert bare(wrapped) is wrapped


def test_modules_are_called_themselves_where_torch_calls_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Plain(WIDTH, WIDTH)
    monkeypatch.setattr(nn.Module, "__call__", nothing)
    assert bare(layer) is layer


def test_a_profile_sees_modules_by_their_calls() -> None:
    layer = Plain(WIDTH, WIDTH)
    # torch 2.11 warns without this.
    with profile(acc_events=True):
        assert bare(layer) is layer


def test_layers_of_a_sequential_stand_in_its_place() -> None:
    first, second, third = (Plain(WIDTH, WIDTH) for _ in range(3))
    inner, empty = nn.Sequential(first, nn.Sequential(second)), nn.Sequential()
    found = bare_calls([inner, empty, third])
    assert found == [first.forward, second.forward, empty.forward, third.forward]
    inner.register_forward_hook(nothing)
    assert bare_calls([inner, third]) == [inner, third.forward]


class Twice(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        once: Tensor = super().forward(input)
        return once * 2


def test_modules_by_name_are_found_when_they_come_later() -> None:
    first, later = Plain(WIDTH, WIDTH), nn.Tanh()
    modules: dict[str, nn.Module | None] = {"a": first}
    calls = BareCalls(modules)
    modules["b"] = later
    later.register_forward_hook(nothing)
    assert calls["a"] == first.forward
    assert calls["b"] is later


@pytest.mark.parametrize("option", [{}, {"recompute": "stage"}, {"recompute": "layer"}])
def test_hooks_that_come_and_go_between_steps_are_called(option: dict[str, Any]) -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Sequential())),
        Twice(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        OwnCall(WIDTH, WIDTH),
    ]
    model = nn.Sequential(*blocks)
    x, y = torch.randn(2, 4, WIDTH)
    linear, inner = blocks[0].children()

    def gradients() -> list[Tensor]:
        return [held.grad.clone() for held in model.parameters() if held.grad is not None]

    def double(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        return output * 2

    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=1, balance=[1, 2], loss_fn=F.mse_loss, **option
    ) as pipe:

        def check() -> None:
            model.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            wanted = gradients()
            model.zero_grad()
            assert torch.equal(pipe.step(x, target=y), loss.detach())
            found = gradients()
            assert len(found) == len(wanted) == 6
            assert all(map(torch.equal, found, wanted))

        for place in (linear, inner, blocks[1], None):
            check()
            if place is None:
                handle = torch_module.register_module_forward_hook(
                    lambda module, given, out: out * 2 if isinstance(module, nn.Tanh) else None
                )
            else:
                handle = place.register_forward_hook(double)
            try:
                check()
            finally:
                handle.remove()
        check()


class Recorded(nn.Module):
    """Its forward is recorded, and calls these modules in turn."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


def recorded() -> nn.Module:
    return Recorded(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def in_one_stage(kind: str) -> Plan:
    """One stage, or two with an R of the first, in the order of the microbatches."""
    actions = [("F", 0), ("B", 0)]
    if kind == "R":
        actions = [("F", 0), ("F", 1), ("B", 1), ("R", 0), ("B", 0)]
    stages = sorted({stage for _, stage in actions})
    row = [Action(Kind[name], stage, number) for number in range(3) for name, stage in actions]
    return Plan(Placement(1, [0 for _ in stages]), 3, [row])


@pytest.mark.parametrize("kind", ["F", "R"])
@pytest.mark.parametrize("make", [sequential, recorded])
def test_the_layers_of_a_bare_stage_are_not_asked_for_hooks(
    make: Callable[[], nn.Module], kind: str
) -> None:
    """R asked those of an `nn.Sequential` in a stage, and so did its F."""
    model = make()
    x, y = torch.randn(2, 3, WIDTH)
    called: set[str] = set()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_qualname)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        # From the end of the first F on.
        sys.setprofile(notice)
        return F.mse_loss(output, target)

    options: dict[str, Any] = {"sample": x[:1]} if make is recorded else {}
    options |= {"devices": "cpu:1", "schedule": in_one_stage(kind), "loss_fn": loss_fn}
    with pykern.Pipeline(model, **options) as pipe:
        # The first steps watch what layers do.
        for _ in range(3):
            called.clear()
            pipe.step(x, target=y)
            # A short step has run on this thread.
            sys.setprofile(None)
    assert "bare_linear.<locals>.linear" in called
    assert (kind == "R") == ("recompute.<locals>.recompute" in called)
    assert not called & {"Module._call_impl", "Module._wrapped_call_impl", "Sequential.forward"}

"""Hooks of modules, tensors and parameters are called as in the plain microbatched loop."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.loop.loops import WIDTH, assert_same, batch, pipeline, plain_loop_step

MICROBATCHES = 3


class Noted(nn.Module):
    """A layer with a hook on a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.log.append(("tensor", gradient.clone())))
        return torch.tanh(y)


def model() -> nn.Sequential:
    return nn.Sequential(*(Noted() for _ in range(4)))


def data() -> tuple[Tensor, Tensor]:
    """torch warns of backward hooks on modules none of whose inputs require grad."""
    x, y = batch()
    return x.requires_grad_(), y


def hook(model: nn.Sequential) -> list[list[Any]]:
    """A hook of every kind on every layer, each of which notes what it was given."""
    logs = []
    for layer in model:
        assert isinstance(layer, Noted)
        logs.append(layer.log)

        def note(kind: str, log: list[Any] = layer.log) -> Any:
            def called(*given: Any) -> None:
                tensors = torch.utils._pytree.tree_leaves(given)
                log.append((kind, *(t.detach().clone() for t in tensors if isinstance(t, Tensor))))

            return called

        layer.register_forward_pre_hook(note("forward pre"))
        layer.register_forward_hook(note("forward"))
        layer.linear.register_full_backward_pre_hook(note("backward pre"))
        layer.linear.register_full_backward_hook(note("backward"))
        layer.linear.weight.register_hook(note("parameter"))
        layer.linear.bias.register_post_accumulate_grad_hook(note("accumulated"))
    return logs


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    assert [kind for kind, *_ in ours] == [kind for kind, *_ in theirs]
    for (_, *one), (_, *other) in zip(ours, theirs, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved", "zb_h1"])
def test_each_stage_calls_all_hooks_with_what_the_plain_loop_gives_them(schedule: str) -> None:
    """Per stage forwards come in the order of microbatches, and so do backwards."""
    layers = model()
    plain = copy.deepcopy(layers)
    ours, theirs = hook(layers), hook(plain)
    with pipeline(layers, schedule=schedule) as pipe:
        for _ in range(2):
            x, y = data()
            assert torch.equal(pipe.step(x, target=y), plain_loop_step(plain, x, y))
            assert_same(pipe, plain)
    for our_log, their_log in zip(ours, theirs, strict=True):
        assert len(their_log) == 2 * MICROBATCHES * 7
        for kinds in ({"forward pre", "forward"}, {"tensor", "backward pre", "backward"}):
            assert_alike(
                [entry for entry in our_log if entry[0] in kinds],
                [entry for entry in their_log if entry[0] in kinds],
            )
        for kind in ("parameter", "accumulated"):
            assert_alike(
                [entry for entry in our_log if entry[0] == kind],
                [entry for entry in their_log if entry[0] == kind],
            )


def test_in_gpipe_order_the_whole_log_of_a_single_stage_is_that_of_the_plain_loop() -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    ours, theirs = hook(layers), hook(plain)
    x, y = data()
    with pipeline(layers, devices="cpu:1", schedule="one_f_one_b") as pipe:
        pipe.step(x, target=y)
    plain_loop_step(plain, x, y)
    for our_log, their_log in zip(ours, theirs, strict=True):
        assert_alike(our_log, their_log)


def test_what_hooks_return_counts() -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    for one in (layers, plain):
        parts: list[Any] = list(one)
        parts[0].register_forward_hook(lambda module, given, output: output * 2)
        parts[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        parts[3].linear.weight.register_hook(lambda gradient: gradient * 3)
        parts[1].linear.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
    with pipeline(layers) as pipe:
        x, y = data()
        assert torch.equal(pipe.step(x, target=y), plain_loop_step(plain, x, y))
        assert_same(pipe, plain)


@pytest.mark.parametrize("level", ["stage", "layer"])
def test_a_recompute_calls_forward_hooks_once_more(level: str) -> None:
    layers = model()
    (log, *_) = hook(layers)
    with pipeline(layers, recompute=level) as pipe:
        for _ in range(2):
            log.clear()
            x, y = data()
            pipe.step(x, target=y)
            kinds = [kind for kind, *_ in log]
            assert kinds.count("forward") == 2 * MICROBATCHES
            assert kinds.count("backward") == kinds.count("parameter") == MICROBATCHES

"""I and W of one graph: together they are its backward, bit for bit and hook for hook."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pykern.runtime.autograd.split import Work, backward_to_inputs
from tests.runtime.split_cases import (
    LAYERS,
    LINEAR,
    ROW,
    WIDTH,
    Make,
    Product,
    data,
    no_work,
    split,
    whole,
)
from tests.support.comparison import assert_same_gradients


@pytest.mark.parametrize("name", LAYERS)
def test_i_and_w_together_are_b(name: str) -> None:
    make, leaves_work = LAYERS[name]
    layer = make()
    plain = copy.deepcopy(layer)
    for _ in range(3):
        x = data(name)
        leaf, work = split(layer, x, lambda: None)
        expected = whole(plain, x)
        assert (leaf.grad is None) == (expected.grad is None)
        if leaf.grad is not None and expected.grad is not None:
            assert torch.equal(leaf.grad, expected.grad)
        assert (work is not None) == leaves_work
        if work is not None:
            work()
        assert_same_gradients(layer, plain)


Events = list[str]


def record_hooks(layers: nn.Sequential, events: Events) -> None:
    """Hooks of every kind that torch has, each with an event of its own."""

    def note(event: str) -> Callable[..., None]:
        return lambda *_: events.append(event)

    def of_output(name: str) -> Callable[..., None]:
        return lambda _module, _input, output: output.register_hook(note(f"output {name}")) and None

    for name, layer in layers.named_children():
        layer.register_forward_hook(of_output(name))
        layer.register_full_backward_pre_hook(note(f"before layer {name}"))
        layer.register_full_backward_hook(note(f"after layer {name}"))
    for name, parameter in layers.named_parameters():
        parameter.register_hook(note(f"parameter {name}"))
        parameter.register_post_accumulate_grad_hook(note(f"parameter {name} done"))


def test_every_hook_fires_once_activations_in_i_and_parameters_in_w() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(*LINEAR), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(*LINEAR))

    ours: Events = []
    theirs: Events = []
    layers, plain = model(), model()
    record_hooks(layers, ours)
    record_hooks(plain, theirs)
    x = torch.randn(5, WIDTH)
    whole(plain, x)
    _, work = split(layers, x)
    assert ours == [event for event in theirs if "parameter" not in event]
    assert len(ours) == 3 * 4
    ours.clear()
    assert work is not None
    work()
    assert ours == [event for event in theirs if "parameter" in event]
    assert len(ours) == 2 * 6


def test_hooks_may_change_gradients() -> None:
    layer = nn.Sequential(nn.Linear(*LINEAR), nn.Linear(*LINEAR))
    plain = copy.deepcopy(layer)
    for model in (layer, plain):
        model.get_parameter("1.weight").register_hook(lambda gradient: gradient * 3)
        model[0].register_forward_hook(
            lambda _module, _input, output: output.register_hook(lambda g: g.sin()) and None
        )
    x = torch.randn(5, WIDTH)
    leaf, work = split(layer, x)
    assert work is not None
    work()
    assert torch.equal(leaf.grad, whole(plain, x).grad)  # type: ignore[arg-type]
    assert_same_gradients(layer, plain)


def hooked_node(w: Tensor, x: Tensor) -> Tensor:
    y = x @ w
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda gradients, _: tuple(gradient * 2 for gradient in gradients))
    return y


def through_cpu(w: Tensor, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return x @ w


@pytest.mark.parametrize("function", [hooked_node, through_cpu, Product.apply])
def test_what_must_not_run_twice_runs_as_a_whole(function: Callable[..., Tensor]) -> None:
    calls: list[int] = []

    def counted(w: Tensor, x: Tensor) -> Tensor:
        y = function(w, x)
        y.register_hook(lambda _: calls.append(1))
        return y

    shape = ROW if function == Product.apply else LINEAR
    layer = Make(counted, shape)
    plain = copy.deepcopy(layer)
    Product.num_backwards = 0
    x = torch.randn(5, WIDTH)
    _, work = split(layer, x, lambda: None)
    assert work is None
    assert calls == [1]
    assert Product.num_backwards == (function == Product.apply)
    whole(plain, x)
    assert_same_gradients(layer, plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_is_recomputed_once(use_reentrant: bool) -> None:
    calls: list[int] = []

    class Checkpointed(nn.Sequential):
        def inner(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=use_reentrant)
            return y

    layer = nn.Sequential(nn.Linear(*LINEAR), Checkpointed(*(nn.Linear(*LINEAR) for _ in range(3))))
    plain = copy.deepcopy(layer)
    x = torch.randn(5, WIDTH)
    _, work = split(layer, x, lambda: None)
    assert work is None
    assert len(calls) == 2
    whole(plain, x)
    assert_same_gradients(layer, plain)


def test_a_whole_backward_waits_for_earlier_microbatches() -> None:
    """The rest of them is done first, so that gradients add up in ascending order."""
    layer = nn.Linear(*LINEAR)
    plain = copy.deepcopy(layer)
    batches = [torch.randn(5, WIDTH) * 10.0**i for i in range(4)]
    works: list[Work | None] = []

    def finish() -> None:
        for i, work in enumerate(works):
            if work is not None:
                work()
            works[i] = None

    for i, x in enumerate(batches):
        hook = layer.register_forward_hook(
            lambda _module, _input, output: output.grad_fn.register_hook(lambda *_: None) and None
        )
        if i != 2:
            hook.remove()
        works.append(split(layer, x, finish)[1])
        hook.remove()
        whole(plain, x)
    assert [work is None for work in works] == [True, True, True, False]
    finish()
    assert_same_gradients(layer, plain)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice() -> None:
    layers = nn.Sequential(*(nn.Linear(*LINEAR) for _ in range(3)))
    with Products() as products:
        _, work = split(layers, torch.randn(5, WIDTH))
        assert products.num == 3 + 3
        assert work is not None
        work()
        assert products.num == 3 + 3 + 3


def test_activations_go_as_early_as_they_can() -> None:
    """After I remains what W multiplies with: not the inside of the activation functions."""
    kept: dict[str, weakref.ref[Tensor]] = {}

    class Keep(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            kept[self.name] = weakref.ref(x)
            return x

    layers = nn.Sequential(
        nn.Linear(*LINEAR), Keep("of gelu"), nn.GELU(), Keep("of linear"), nn.Linear(*LINEAR)
    )
    output = layers(torch.randn(5, WIDTH).requires_grad_())
    del output
    _, work = split(layers, torch.randn(5, WIDTH))
    assert kept["of gelu"]() is None
    assert kept["of linear"]() is not None
    assert work is not None
    work()
    assert kept["of linear"]() is None


def test_an_input_that_nothing_uses_gets_no_gradient() -> None:
    layer = nn.Linear(*LINEAR)
    used, unused = (torch.randn(5, WIDTH, requires_grad=True) for _ in range(2))
    output = layer(used)
    work = backward_to_inputs([output], [torch.ones_like(output)], [used, unused], no_work)
    assert used.grad is not None
    assert unused.grad is None
    assert work is not None


def test_a_graph_that_has_run_cannot_run_again() -> None:
    layer = nn.Sequential(nn.Linear(*LINEAR), nn.Tanh())
    leaf = torch.randn(5, WIDTH).requires_grad_()
    output = layer(leaf)
    backward_to_inputs([output], [torch.ones_like(output)], [leaf], no_work)
    with pytest.raises(RuntimeError, match="freed by its input gradients"):
        output.sum().backward()


def test_an_error_in_the_weights_comes_as_it_is() -> None:
    error = ValueError("planted")

    def fail(_: Tensor) -> None:
        raise error

    layer = nn.Linear(*LINEAR)
    layer.weight.register_post_accumulate_grad_hook(fail)
    _, work = split(layer, torch.randn(5, WIDTH))
    assert work is not None
    with pytest.raises(ValueError, match="planted") as caught:
        work()
    assert caught.value is error

"""Bare calls of torch's own layers do what the layers do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

import pykern
from pykern.torch_private import Interceptor, watch_draws
from pykern.torch_private.bare_calls import bare

SEED = 3


class Giving(Interceptor):
    """Gives draws a generator of its own."""

    def __init__(self) -> None:
        watch_draws()
        self.generator = torch.Generator().manual_seed(SEED)


class Halved(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def halve(layer: nn.Dropout) -> nn.Dropout:
    """A layer with a forward of its own."""
    layer.forward = lambda input: input / 2  # type: ignore[method-assign]
    return layer


def squares(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(3, 4).square().to(dtype)


LAYERS: dict[str, Callable[[], nn.Dropout]] = {
    "half": nn.Dropout,
    "most": lambda: nn.Dropout(0.9),
    "nothing": lambda: nn.Dropout(0),
    "all": lambda: nn.Dropout(1),
    "in place": lambda: nn.Dropout(0.5, inplace=True),
    "of evaluation": lambda: nn.Dropout().eval(),
    "own class": Halved,
    "own forward": lambda: halve(nn.Dropout()),
}
VALUES: dict[str, Callable[[], Tensor]] = {
    "float32": squares,
    "float64": lambda: squares(torch.float64),
    "bfloat16": lambda: squares(torch.bfloat16),
    "complex": lambda: squares(torch.complex64),
    "strided": lambda: squares().T[::2],
    "expanded": lambda: squares()[:1].expand(5, 4),
    "no rows": lambda: squares()[:0],
    "number": lambda: squares().sum(),
    "parameter": lambda: nn.Parameter(squares()),
}


def outcome(call: Callable[[Tensor], Tensor], value: Tensor) -> Tensor | type[RuntimeError]:
    """The result, or the type of the error: torch drops no complex values, nor any in a leaf."""
    try:
        return call(value)
    except RuntimeError as error:
        return type(error)


def same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(found is wanted)
    return (
        torch.equal(found, wanted)
        and found.dtype == wanted.dtype
        and found.stride() == wanted.stride()
    )


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_bare_dropout_draws_what_torch_draws(name: str, kind: str) -> None:
    layer = LAYERS[name]()
    call = bare(layer)
    torch.manual_seed(SEED)
    wanted = outcome(layer, VALUES[kind]())
    after = torch.get_rng_state()
    with Giving() as giving:
        found = outcome(call, VALUES[kind]())
    assert same(found, wanted)
    assert giving.generator is not None
    # Without an interceptor, and where torch draws from other generators, it is the plain layer.
    torch.manual_seed(SEED)
    assert same(outcome(call, VALUES[kind]()), wanted)
    assert torch.equal(torch.get_rng_state(), after)
    if isinstance(wanted, Tensor):
        assert torch.equal(giving.generator.get_state(), after)


def test_gradients_go_back_through_a_bare_dropout() -> None:
    layer = nn.Dropout()
    x, other = squares().requires_grad_(), squares().requires_grad_()
    torch.manual_seed(SEED)
    layer(other).sum().backward()
    with Giving():
        y = bare(layer)(x)
    y.sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


class Asked(Interceptor):
    """Notes what it is asked."""

    def __init__(self) -> None:
        watch_draws()
        self.asked: list[tuple[str, Any]] = []

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.asked.append((str(func), kwargs.get("generator")))
        return func(*args, **kwargs)


def other_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.ones_like(layer.weight))


def weight_of_a_tensor(layer: nn.Linear) -> None:
    """As networks do that compute the weights of others."""
    weight = layer.weight.detach() * 2
    del layer.weight
    layer.weight = weight


def weight_hidden(layer: nn.Linear) -> None:
    vars(layer)["weight"] = layer.weight.detach() * 3


def pruned_for_ever(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.remove(layer, "weight")


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "nothing": lambda layer: None,
    "no bias": lambda layer: layer.register_parameter("bias", None),
    "another weight": other_weight,
    "a tensor as weight": weight_of_a_tensor,
    "float64": lambda layer: layer.double().float(),
    "loaded": lambda layer: layer.load_state_dict(nn.Linear(4, 4).state_dict(), assign=True),
    "pruned": pruned_for_ever,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_bare_linear_has_the_parameters_of_its_layer(change: str) -> None:
    layer, x = nn.Linear(4, 4), squares()
    call = bare(layer)
    assert torch.equal(call(x), layer(x))
    CHANGES[change](layer)
    for found in (call, bare(layer)):
        assert torch.equal(found(x), layer(x))


def test_a_bare_linear_has_the_attributes_that_hide_parameters() -> None:
    layer, x = nn.Linear(4, 4), squares()
    weight_hidden(layer)
    assert torch.equal(bare(layer)(x), F.linear(x, layer.weight, layer.bias))
    assert not torch.equal(bare(layer)(x), nn.Linear.forward(nn.Linear(4, 4), x))


def test_a_bare_linear_has_the_parameters_of_a_functional_call() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.calls = [bare(self.inner)]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.calls[0](x)
            return y

    model, x = Around(), squares()
    weight, bias = torch.ones(4, 4), torch.zeros(4)
    found = functional_call(model, {"inner.weight": weight, "inner.bias": bias}, (x,))
    assert torch.equal(found, F.linear(x, weight, bias))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Dropout(0)])
def test_arguments_have_torch_s_names(layer: nn.Module) -> None:
    assert torch.equal(bare(layer)(input=squares()), layer(input=squares()))


def test_a_wrong_call_names_the_layer() -> None:
    with pytest.raises(TypeError, match=r"^Linear.forward\(\) takes"):
        bare(nn.Linear(4, 4))(squares(), squares())


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    dropout, linear = halve(nn.Dropout()), nn.Linear(4, 4)
    linear.forward = lambda input: input * 2  # type: ignore[method-assign]
    assert bare(dropout) is dropout.forward
    assert bare(linear) is linear.forward


def test_a_forward_that_is_patched_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4)
    monkeypatch.setattr(nn.Linear, "forward", lambda _, input: input * 2)
    assert torch.equal(bare(layer)(squares()), squares() * 2)


def test_a_linear_is_called_without_a_search_for_its_parameters() -> None:
    """Each takes a call of `nn.Module.__getattr__`, about as long as a bare linear's own."""
    layer, called = nn.Linear(4, 4), []
    call = bare(layer)
    given = squares()

    def notice(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(notice)
    try:
        call(given)
    finally:
        sys.setprofile(None)
    assert called == ["bare_linear.<locals>.linear"]


def test_an_outer_interceptor_is_asked() -> None:
    """Pipelines within layers of others: the outer one sees that a generator is given."""
    call = bare(nn.Dropout())
    with Asked() as outer, Giving():
        call(squares())
    ((name, given),) = outer.asked
    assert name == "aten.bernoulli_.float"
    assert given.initial_seed() == SEED


class GivingAsked(Asked):
    generator = torch.Generator()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_dropped_as_torch_does_it() -> None:
    with GivingAsked() as giving:
        bare(nn.Dropout())(torch.nested.nested_tensor([squares(), squares()[:1]]))
    assert giving.asked == [("aten.native_dropout.default", None)]


class Noted(Tensor):
    """Notes the functions of torch that get one, as sharded tensors have ways of their own."""

    called: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def test_subclasses_are_given_the_dropout_itself() -> None:
    value = squares().as_subclass(Noted)
    Noted.called.clear()
    with Giving():
        bare(nn.Dropout())(value)
    assert Noted.called == ["dropout"]


class Called(TorchFunctionMode):
    """Notes the functions that are called within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Dropout()])
def test_a_mode_is_given_what_the_layer_gives_it(layer: nn.Module) -> None:
    with Called() as plain:
        layer(squares())
    with Giving(), Called() as found:
        bare(layer)(squares())
    assert found.names == plain.names


def test_draws_after_a_bare_dropout_are_intercepted() -> None:
    with GivingAsked() as giving:
        bare(nn.Dropout())(squares())
        torch.rand(2)
    assert giving.asked == [("aten.rand.default", None)]


def test_draws_of_a_bare_dropout_are_not_intercepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel in Python costs more than the draw of a small tensor."""
    num_stages, num_microbatches = 2, 3
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(num_stages))
    )
    x, y = torch.randn(2, 3, 4)
    direct: list[str] = []
    original = Tensor.bernoulli_

    def bernoulli_(*args: Any, **kwargs: Any) -> Any:
        direct.append("draw")
        return original(*args, **kwargs)

    with pykern.Pipeline(
        model, devices="cpu:2", microbatches=num_microbatches, loss_fn=F.mse_loss
    ) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        # The interceptors' kernel has torch's own method.
        monkeypatch.setattr(Tensor, "bernoulli_", bernoulli_)
        pipe.step(x, target=y)
    # The first draw of a step takes the seed of the step.
    assert len(direct) == num_stages * num_microbatches - 1

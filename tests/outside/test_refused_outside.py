"""Refusals of a loss outside of a pipeline, and their messages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import pykern
from pykern import schedules
from tests.outside.cases import (
    WIDTH,
    batch,
    model,
    pipeline,
)


def test_a_second_backward_is_refused() -> None:
    with pipeline(model()) as pipe:
        y = pipe(batch())
        y.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"has run already.*call backward\(\) once"):
            y.sum().backward()


def test_second_derivatives_are_refused() -> None:
    with pipeline(model()) as pipe:
        x = batch().requires_grad_()
        with pytest.raises(RuntimeError, match=r"create_graph must be False .* got True"):
            torch.autograd.grad(pipe(x).sum(), [x], create_graph=True)


def test_layers_that_changed_are_not_recomputed() -> None:
    layers = nn.Sequential(*(nn.Sequential(one, nn.Dropout(0.4)) for one in model()))
    with pipeline(layers, recompute="stage") as pipe:
        y = pipe(batch())
        layers.eval()
        with pytest.raises(RuntimeError, match=r"have changed .* since the forward"):
            y.sum().backward()
        pipe(batch()).sum().backward()


class Writes(dict[str, Any]):
    """A dictionary of parameters that notes which names are written."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.names: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        self.names.append(name)
        super().__setitem__(name, value)


def test_a_call_that_is_refused_leaves_the_parameters_of_a_running_step_in_place() -> None:
    layers = model()
    linear = layers.get_submodule("0.0")
    writes = linear._parameters = Writes(linear._parameters)
    with pipeline(layers) as pipe:
        y = pipe(batch())
        assert writes.names == ["weight", "bias", "bias", "weight"]
        writes.names.clear()
        with pipe._executor.alone():
            for refused in (lambda: pipe(batch()), lambda: y.sum().backward(retain_graph=True)):
                with pytest.raises(RuntimeError, match="already running a step"):
                    refused()
        assert writes.names == []


def test_a_backward_that_is_refused_may_be_called_again() -> None:
    layers = model()
    with pipeline(layers) as pipe:
        y = pipe(batch()).sum()
        with pipe._executor.alone():
            for _ in range(2):
                with pytest.raises(RuntimeError, match="already running a step"):
                    y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        assert all(parameter.grad is not None for parameter in layers.parameters())
        with pytest.raises(RuntimeError, match="has run already"):
            y.backward()


FORWARDS: list[torch.Size] = []


class Noted(nn.Module):
    """Notes the shape of each batch with which its own forward, and no recording of it, runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS.append(x.shape)
        hidden: Tensor = self.last(self.first(x).tanh())
        return hidden


def test_a_call_that_is_refused_records_no_forward() -> None:
    with pipeline(Noted(), sample=batch()) as pipe:
        pipe(batch())
        FORWARDS.clear()
        with pipe._executor.alone(), pytest.raises(RuntimeError, match="already running a step"):
            pipe(batch()[:, None])
        assert FORWARDS == []
        pipe(batch()[:, None]).sum().backward()
        assert FORWARDS


class Counts(nn.Linear):
    """Counts its calls."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_numbers_that_a_forward_changes_itself_are_no_change_of_layers() -> None:
    first, last = Counts(4, 4), Counts(4, 4)
    layers = nn.Sequential(first, last)
    with pipeline(layers, recompute="stage") as pipe:
        x = torch.randn(8, 4)
        for _ in range(2):
            pipe(x).sum().backward()
            assert first.weight.grad is not None
            torch.testing.assert_close(last.bias.grad, torch.full((4,), 8.0), rtol=0, atol=0)
            layers.zero_grad()
        y = pipe(x)
        first.calls = 0
        with pytest.raises(RuntimeError, match=r"have changed .* since the forward"):
            y.sum().backward()


def test_parameters_that_were_written_are_refused() -> None:
    for recompute in (None, "stage"):
        layers = model()
        with pipeline(layers, recompute=recompute) as pipe:
            y = pipe(batch())
            with torch.no_grad():
                for parameter in layers.parameters():
                    parameter.mul_(2)
            with pytest.raises(
                RuntimeError, match=r"modified by an inplace|parameters must stay as they are"
            ):
                y.sum().backward()
            assert all(parameter.grad is None for parameter in layers.parameters())


class Shifted(nn.Linear):
    """Adds a buffer, and a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.shift: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(super().forward(x) * self.frozen + self.shift)


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "'shift'": lambda layer, _: layer.shift.zero_(),
    "'shift', by another": lambda layer, _: setattr(layer, "shift", torch.zeros(WIDTH)),
    "'frozen'": lambda layer, _: layer.frozen.detach().zero_(),
    "the batch": lambda _, x: x.zero_(),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("level", ["layer", "stage"])
def test_what_a_recompute_reads_again_must_not_be_written(level: str, what: str) -> None:
    layers = nn.Sequential(*(Shifted() for _ in range(4)))
    with pipeline(layers, recompute=level) as pipe:
        for _ in range(2):
            x = batch()
            pipe(x.clone()).sum().backward()
            # A second call between the two, whose forwards write to a buffer.
            y = pipe(x)
            pipe(batch()).sum().backward()
            layers.zero_grad()
            CHANGES[what](layers[1], x)
            with pytest.raises(RuntimeError, match=f"got changes of {what.partition(',')[0]}"):
                y.sum().backward()
            assert all(parameter.grad is None for parameter in layers.parameters())


def test_a_hidden_graph_is_refused() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Boxing(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x))

    with pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), Boxing(WIDTH, WIDTH))) as pipe:
        with pytest.raises(TypeError, match=r"tensors in tuples, lists, dicts .* got Box"):
            pipe(batch())
        with torch.no_grad():
            assert isinstance(pipe(batch()), Box)


def test_a_plan_without_backwards_says_so() -> None:
    with pipeline(model(), schedules.one_f_one_b(2, 3).forward_only()) as pipe:
        y = pipe(batch())
        assert y.requires_grad
        with pytest.raises(RuntimeError, match="the plan has forward actions only"):
            y.sum().backward()


def test_replicas_say_that_no_gradients_come_back() -> None:
    layers = model()
    options: dict[str, Any] = {"devices": "cpu:4", "microbatches": 4, "replicas": 2}
    with pykern.Pipeline(layers, **options) as pipe:
        y = pipe(batch())
        with pytest.raises(RuntimeError, match=r"several replicas.*call step\(\)"):
            y.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_what_torch_would_make_of_it_besides_is_refused() -> None:
    layers = model()
    with pipeline(layers) as pipe:
        named = {name: one.detach() for name, one in pipe.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(pipe, parameters, (x,))
            return out.sum()

        for transformed in (
            lambda: torch.func.grad(loss)(named, batch()),
            lambda: torch.func.vmap(lambda row: pipe(row[None]))(batch()),
            lambda: torch.func.jvp(pipe, (batch(),), (batch(),)),
        ):
            with pytest.raises(RuntimeError, match=r"got a call within a transform of torch\.func"):
                transformed()
        for name, exported in (
            (r"torch\.export", lambda: torch.export.export(pipe, (batch(),))),
            (r"torch\.jit\.trace", lambda: torch.jit.trace(pipe, batch())),
        ):
            for mode in (torch.enable_grad(), torch.no_grad()):
                with mode, pytest.raises(RuntimeError, match=f"{name}, .* Use the model that"):
                    exported()
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="within forward-mode"):
            pipe(forward_ad.make_dual(batch(), batch()))
        # With other parameters, and their gradients.
        others = {name: one.clone().requires_grad_() for name, one in named.items()}
        loss(others, batch()).backward()
        assert all(one.grad is not None for one in others.values())
        assert all(parameter.grad is None for parameter in layers.parameters())

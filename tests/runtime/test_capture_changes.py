"""Changes by a program between captured steps: it is replayed right, or called, never ignored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import Case
from tests.runtime.test_capture import ROWS, captured, steps
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step


class Scaled(nn.Linear):
    """Holds what modules hold: a buffer, a tensor that is not a buffer, a word."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.buffer = nn.Buffer(torch.ones(1))
        self.scale = torch.ones(1)
        self.activation = "relu"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale * self.buffer
        return y.relu() if self.activation == "relu" else y.tanh()


def case_of(*layers: nn.Module, loss_fn: Any = F.mse_loss) -> Case:
    return Case(nn.Sequential(*layers), torch.randn(ROWS, 12), torch.randn(ROWS, 12), loss_fn)


def step_alike(pipe: pykern.Pipeline, plain: nn.Sequential, case: Case) -> None:
    expected = plain_step(plain, case.inputs, case.target, case.loss_fn, 4, pipe.partition.stages)
    assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
    assert_same_state(pipe, plain)


def twice_alike(pipe: pykern.Pipeline, plain: nn.Sequential, case: Case) -> None:
    for _ in range(2):
        step_alike(pipe, plain, case)


def new_parameter(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.full_like(layer.weight, 0.1))


def new_data(layer: Any) -> None:
    layer.weight.data = torch.full_like(layer.weight, 0.1)


def new_state(layer: Any) -> None:
    state = {name: value * 0.5 for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def new_buffer(layer: Any) -> None:
    layer.buffer = torch.full((1,), 3.0)


def new_tensor(layer: Any) -> None:
    layer.scale = torch.full((1,), 3.0)


def new_word(layer: Any) -> None:
    layer.activation = "tanh"


def new_forward(layer: Any) -> None:
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 2


REPLACED = [new_parameter, new_data, new_state, new_buffer, new_tensor, new_word, new_forward]


@pytest.mark.parametrize("change", REPLACED)
def test_what_a_layer_holds_may_be_replaced(
    gpus: FakeCuda, change: Callable[[nn.Module], None]
) -> None:
    case = case_of(Scaled(12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        steps(pipe, plain, case, 3)
        launches = gpus.calls("cuGraphLaunch")
        for model in (case.layers, plain):
            change(model[0])
        step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") == launches
        step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") > launches


def test_a_parameter_may_be_replaced_before_the_capture(gpus: FakeCuda) -> None:
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        step_alike(pipe, plain, case)
        for model in (case.layers, plain):
            new_parameter(model[0])
        for _ in range(3):
            step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") > 0


@pytest.mark.parametrize("reuses", [False, True])
def test_layers_may_be_changed_any_number_of_times(gpus: FakeCuda, reuses: bool) -> None:
    """Only changes without a capture in between are taken to be regular.

    The driver gives the graphs of a later capture the handles of earlier ones.
    """
    if reuses:
        gpus.reuse_handles()
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(5):
            launches = gpus.calls("cuGraphLaunch")
            for model in (case.layers, plain):
                new_parameter(model[0])
            twice_alike(pipe, plain, case)
            assert gpus.calls("cuGraphLaunch") > launches


def hook_on_layer(layer: nn.Module) -> Any:
    return layer.register_forward_hook(lambda _layer, _inputs, output: output * 2)


def hook_on_parameter(layer: nn.Module) -> Any:
    return next(layer.parameters()).register_hook(lambda gradient: gradient * 2)


def hook_on_all(layer: nn.Module) -> Any:
    def double(called: nn.Module, _: Any, output: Tensor) -> Tensor:
        return output * 2 if type(called) is type(layer) else output

    return nn.modules.module.register_module_forward_hook(double)  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", [hook_on_layer, hook_on_parameter, hook_on_all])
def test_hooks_that_come_later_are_called_and_those_that_go_are_forgotten(
    gpus: FakeCuda, hook: Callable[[nn.Module], Any]
) -> None:
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4), "auto") as pipe:
        steps(pipe, plain, case, 3)
        for model in (case.layers, plain):
            model.zero_grad()
        launches = gpus.calls("cuGraphLaunch")
        handles = [hook(model[0]) for model in (case.layers, plain)]
        try:
            with pytest.warns(UserWarning, match="without CUDA graphs"):
                twice_alike(pipe, plain, case)
        finally:
            for handle in handles:
                handle.remove()
        assert gpus.calls("cuGraphLaunch") == launches
        for model in (case.layers, plain):
            model.zero_grad()
        steps(pipe, plain, case, 3)
        assert gpus.calls("cuGraphLaunch") > launches


def test_what_was_in_the_way_may_be_removed(gpus: FakeCuda) -> None:
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        handle = case.layers[0].register_forward_hook(lambda *_: None)
        step_alike(pipe, plain, case)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has hooks, which a replay would not call"):
                pipe.step(case.inputs, target=case.target)
        handle.remove()
        for model in (case.layers, plain):
            model.zero_grad()
        steps(pipe, plain, case, 3)
        assert gpus.calls("cuGraphLaunch") > 0


class ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * self.scale


def test_a_loss_may_be_changed(gpus: FakeCuda) -> None:
    loss = ScaledLoss()
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12), loss_fn=loss)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        steps(pipe, plain, case, 3)
        launches = gpus.calls("cuGraphLaunch")
        loss.scale = 2.0
        step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") == launches
        step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") > launches


def test_hooks_of_a_loss_are_refused(gpus: FakeCuda) -> None:
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda *_: None)
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12), loss_fn=loss)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        pipe.step(case.inputs, target=case.target)
        with pytest.raises(RuntimeError, match=r"MSELoss \(the loss\) has hooks"):
            pipe.step(case.inputs, target=case.target)


class Remembers(nn.Linear):
    """A replay would compute each state from the one that was there at the capture."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("capture", [True, "auto"])
def test_a_layer_that_replaces_what_it_holds_is_refused(gpus: FakeCuda, capture: Any) -> None:
    case = case_of(nn.Linear(12, 12), Remembers(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4), capture) as pipe:
        step_alike(pipe, plain, case)
        match = r"Remembers \(layer 0 of stage 1\) changes what it holds when it is called"
        if capture is True:
            with pytest.raises(RuntimeError, match=match):
                pipe.step(case.inputs, target=case.target)
        else:
            with pytest.warns(UserWarning, match=match):
                step_alike(pipe, plain, case)
            captures = gpus.calls("cuGraphInstantiateWithFlags")
            for _ in range(3):
                step_alike(pipe, plain, case)
            assert gpus.calls("cuGraphInstantiateWithFlags") == captures
        assert gpus.calls("cuGraphLaunch") == 0
        del case.layers[1].last


def test_a_gradient_that_stays_from_before_is_not_taken_for_trained(gpus: FakeCuda) -> None:
    case = case_of(nn.Linear(12, 12), nn.Linear(12, 12))
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        step_alike(pipe, plain, case)
        for model in (case.layers, plain):
            model[0].requires_grad_(False)
        for _ in range(2):
            step_alike(pipe, plain, case)
        for model in (case.layers, plain):
            model.zero_grad()
        step_alike(pipe, plain, case)
        assert gpus.calls("cuGraphLaunch") > 0
        assert case.layers[0].weight.grad is None


def test_layers_that_share_a_parameter_have_one_gradient(gpus: FakeCuda) -> None:
    first, tied = nn.Linear(12, 12), nn.Linear(12, 12)
    tied.weight = first.weight
    case = case_of(first, tied)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(1, 4)) as pipe:
        for _ in range(2):
            for _ in range(3):
                step_alike(pipe, plain, case)
            for model in (case.layers, plain):
                model.zero_grad()
        assert gpus.calls("cuGraphLaunch") > 0

"""Graph mode on the fake driver: replays have the bits of the plain model, or say why not."""

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Placement, Plan
from pykern.runtime.gpu.capture.recording import Recording
from pykern.runtime.gpu.capture.refusals import CannotCapture, refuse_stage
from pykern.runtime.stage.stage import Stage
from tests.diagonal import diagonal, nightly
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES, Case
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# In four microbatches each begins at a multiple of 16 bytes, as copies of them do: what a matrix
# product rounds to depends on where its factors lie.
ROWS = 16


def captured(case: Case, plan: Plan, capture: Any = True, devices: Any = None) -> pykern.Pipeline:
    names = [f"cuda:{device}" for device in range(plan.num_devices)]
    return pykern.Pipeline(
        case.layers,
        devices=devices or names,
        schedule=plan,
        loss_fn=case.loss_fn,
        capture=capture,
    )


def steps(pipe: pykern.Pipeline, plain: nn.Sequential, case: Case, count: int) -> None:
    """Steps of both, with an update after each; equal to the bit after each."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, plain)]
    for number in range(count):
        x = case.inputs[:ROWS].roll(number, 0)
        y = case.target[:ROWS].roll(number, 0)
        expected = plain_step(
            plain, x, y, case.loss_fn, pipe.plan.num_microbatches, pipe.partition.stages
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)
        # The second adds to the gradients of the first.
        if number % 3 != 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("cnn", "hanayo"),
        ("frozen", "zb_h1"),
        ("gpt", "zb_h1"),
        ("mlp", "interleaved"),
        ("recurrent", "zb_h1"),
        ("structured", "hanayo"),
        *(nightly(model, "zb_h1") for model in ("cnn", "mlp", "structured")),
        nightly("frozen", "hanayo"),
        nightly("mlp", "one_f_one_b"),
    ],
)
def test_replays_have_the_bits_of_the_plain_model(
    gpus: FakeCuda,
    model: str,
    name: str,
) -> None:
    case = CASES[model](ROWS)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.by_name[name](2, 4)) as pipe:
        steps(pipe, plain, case, 6)
        assert gpus.calls("cuGraphLaunch") > 0


@pytest.mark.parametrize(
    ("name", "devices"),
    diagonal(["gpipe", "zb_v", "breadth_first"], [["cuda:0"] * 4, "cuda:0/4", None]),
)
def test_lanes_may_share_a_gpu_or_not_reach_each_other(
    gpus: FakeCuda,
    name: str,
    devices: Any,
) -> None:
    gpus.set_peer(0, 1, False)
    gpus.set_peer(3, 2, False)
    case = CASES["mlp"](ROWS)
    plain = copy.deepcopy(case.layers)
    detours = "0 to 1, 3 to 2. Copies go through pinned memory"
    with pytest.warns(UserWarning, match=detours) if devices is None else nullcontext():
        pipe = captured(case, schedules.by_name[name](4, 8), devices=devices)
    with pipe:
        steps(pipe, plain, case, 4)


@pytest.mark.parametrize("capture", [True, "step"])
@pytest.mark.parametrize("backward", ["B", "IW"])
def test_a_gradient_may_wait_on_its_lane_while_its_slot_is_used_again(
    gpus: FakeCuda, capture: Any, backward: str
) -> None:
    # Stage 1 has one slot, and stage 0 takes its gradients when both microbatches are through.
    late = [Action(Kind[kind], 0, m) for m in range(2) for kind in backward]
    row = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)]
    for m in range(2):
        row += [Action(Kind.F, 1, m), *(Action(Kind[kind], 1, m) for kind in backward)]
    plan = Plan(Placement.looped(1, 2), 2, [[*row, *late]])
    case = CASES["mlp"](ROWS)
    plain = copy.deepcopy(case.layers)
    with captured(case, plan, capture) as pipe:
        steps(pipe, plain, case, 3)


@pytest.mark.parametrize(
    ("model", "name"),
    diagonal(["mlp", "gpt", "structured"], ["one_f_one_b", "hanayo", "zb_h1"]),
)
def test_a_whole_step_is_one_launch(gpus: FakeCuda, model: str, name: str) -> None:
    gpus.set_peer(1, 0, False)
    case = CASES[model](ROWS)
    plain = copy.deepcopy(case.layers)
    with pytest.warns(UserWarning, match="do not reach each other's memory: 1 to 0"):
        pipe = captured(case, schedules.by_name[name](2, 4), "step")
    with pipe:
        steps(pipe, plain, case, 4)
        assert gpus.calls("cuGraphLaunch") == 3
        with pipe.tracing():
            steps(pipe, plain, case, 1)
        assert gpus.calls("cuGraphLaunch") > 4
        assert pipe.timeline().makespan_ns > 0


def test_after_the_first_step_nothing_is_called(gpus: FakeCuda) -> None:
    calls = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    layers = nn.Sequential(*(Counted(4, 4) for _ in range(2)))
    case = Case(layers, torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)
    plan = schedules.one_f_one_b(2, 4)
    with captured(case, plan) as pipe:
        pipe.step(case.inputs, target=case.target)
        assert len(calls) == 8
        calls.clear()
        before = gpus.calls("cuGraphLaunch")
        pipe.step(case.inputs, target=case.target)
        assert gpus.calls("cuGraphLaunch") - before == plan.num_actions


def forbidden(*_: Any) -> None:
    raise AssertionError("a hook")


def hooked() -> nn.Module:
    layer = nn.Linear(12, 12)
    layer.register_forward_hook(lambda *_: None)
    return layer


def hooked_parameter() -> nn.Module:
    layer = nn.Linear(12, 12)
    layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    return layer


class Objects(nn.Module):
    """Refuses a second call, as a capture refuses a synchronisation with the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        if len(self.calls) > 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * 1


OBSTACLES = {
    "dropout": (lambda: nn.Dropout(0.5), r"Dropout \(layer 0 of stage 1\) draws random numbers"),
    "hook": (hooked, r"Linear \(layer 0 of stage 1\) has hooks"),
    "parameter": (hooked_parameter, r"weight of Linear \(layer 0 of stage 1\) has hooks"),
    "sync": (Objects, r"F of Objects \(layer 0 of stage 1\) cannot be captured: operation not"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_captured_is_named(gpus: FakeCuda, name: str) -> None:
    make, message = OBSTACLES[name]
    layers = nn.Sequential(nn.Linear(12, 12), make(), nn.Linear(12, 12))
    case = Case(layers, torch.randn(ROWS, 12), torch.randn(ROWS, 12), F.mse_loss)
    with pykern.Pipeline(
        layers,
        devices=["cuda:0", "cuda:1"],
        schedule=schedules.one_f_one_b(2, 4),
        loss_fn=F.mse_loss,
        balance=[1, 2],
        capture=True,
    ) as pipe:
        pipe.step(case.inputs, target=case.target)
        with pytest.raises(RuntimeError, match=message):
            pipe.step(case.inputs, target=case.target)


class Strided(nn.Module):
    """Hands over what leaves gaps in its memory, and a gradient that is one number throughout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x), 1)[:, ::2]


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True).expand(-1, 3)


@pytest.mark.parametrize("name", ["gpipe", "hanayo"])
def test_what_is_handed_over_may_have_any_strides(gpus: FakeCuda, name: str) -> None:
    layers = [nn.Linear(12, 12), Strided(), nn.Linear(12, 12), Summed()]
    x = torch.randn(ROWS, 12)
    case = Case(nn.Sequential(*layers), x, torch.randn(ROWS, 3), F.mse_loss)
    plain = copy.deepcopy(case.layers)
    plan = schedules.by_name[name](2, 4)
    with pykern.Pipeline(
        case.layers,
        devices=["cuda:0", "cuda:1"],
        schedule=plan,
        loss_fn=F.mse_loss,
        balance=[2, 2] if plan.num_stages == 2 else [1, 1, 1, 1],
        capture=True,
    ) as pipe:
        steps(pipe, plain, case, 3)


def test_sparse_gradients_are_refused() -> None:
    stage = Stage(1, [nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 12, sparse=True))])
    stage.draws.watched(drew=False, num_seeds=0, only_seeds=True)
    message = r"Embedding \(1 in layer 0 of stage 1\) has sparse gradients"
    with pytest.raises(CannotCapture, match=message):
        refuse_stage(stage)


def test_channels_may_be_last(gpus: FakeCuda) -> None:
    case = CASES["cnn"](ROWS)
    data = case.inputs.to(memory_format=torch.channels_last)
    case = Case(case.layers, data, case.target, case.loss_fn)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        steps(pipe, plain, case, 3)


def test_closing_gives_memory_back(gpus: FakeCuda) -> None:
    case = CASES["mlp"](ROWS)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
    assert not any(type(thing) is Recording for thing in gc.get_objects())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        pipe.step(case.inputs, target=case.target)


def test_a_loss_that_trains_is_refused(gpus: FakeCuda) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.linear(x), y)

    layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(2)))
    case = Case(layers, torch.randn(ROWS, 12), torch.randn(ROWS, 12), Loss())
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        pipe.step(case.inputs, target=case.target)
        with pytest.raises(RuntimeError, match="stage 1, or the loss, trains a tensor"):
            pipe.step(case.inputs, target=case.target)


@pytest.mark.parametrize("model", ["dropout", "mlp"])
def test_auto_captures_or_warns_once_and_goes_on(gpus: FakeCuda, model: str) -> None:
    case = CASES[model](ROWS)
    plain = copy.deepcopy(case.layers)
    with (
        warnings.catch_warnings(record=True) as caught,
        captured(case, schedules.one_f_one_b(2, 4), "auto") as pipe,
    ):
        warnings.simplefilter("always")
        steps(pipe, plain, case, 4)
    texts = [str(warning.message) for warning in caught]
    if model == "dropout":
        assert len(texts) == 1
        assert "steps run without CUDA graphs: Dropout (layer 1 of stage 0) draws" in texts[0]
        assert gpus.calls("cuGraphLaunch") == 0
    else:
        assert texts == []
        assert gpus.calls("cuGraphLaunch") > 0


def test_other_shapes_run_as_usual_with_one_warning(gpus: FakeCuda) -> None:
    case = CASES["mlp"](ROWS)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        steps(pipe, plain, case, 3)
        launches = gpus.calls("cuGraphLaunch")
        expected = r"\(6, 12\), \(6, 12\) in microbatches of 1, 2"
        for rows, match in [(6, expected), (8, None)]:
            x, y = case.inputs[:rows], case.target[:rows]
            loss = plain_step(plain, x, y, case.loss_fn, 4, pipe.partition.stages)
            if match:
                with pytest.warns(UserWarning, match=match):
                    assert torch.equal(pipe.step(x, target=y), loss)
            else:
                assert torch.equal(pipe.step(x, target=y), loss)
            assert_same_state(pipe, plain)
        assert gpus.calls("cuGraphLaunch") == launches
        steps(pipe, plain, case, 1)
        assert gpus.calls("cuGraphLaunch") > launches


def test_changed_layers_are_captured_again(gpus: FakeCuda) -> None:
    case = CASES["cnn"](ROWS)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        steps(pipe, plain, case, 2)
        for change in (
            lambda model: model.eval(),
            lambda model: model.train(),
            lambda model: next(model.parameters()).requires_grad_(False),
        ):
            for model in (pipe, plain):
                change(model)
                model.zero_grad()
            launches = gpus.calls("cuGraphLaunch")
            steps(pipe, plain, case, 1)
            assert gpus.calls("cuGraphLaunch") == launches
            steps(pipe, plain, case, 2)
            assert gpus.calls("cuGraphLaunch") > launches


def test_prediction_and_tracing_go_beside_it(gpus: FakeCuda) -> None:
    case = CASES["mlp"](ROWS)
    with captured(case, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(2):
            pipe.step(case.inputs, target=case.target)
        assert torch.equal(pipe(case.inputs), case.layers(case.inputs))
        with pipe.tracing():
            pipe.step(case.inputs, target=case.target)
        actions = [span.action for row in pipe.timeline().rows for span in row]
        assert sorted(map(str, actions)) == sorted(
            str(action) for row in pipe.plan.rows for action in row
        )


def test_where_nothing_can_be_captured_it_is_refused_at_once() -> None:
    for capture in (True, "step"):
        with pytest.raises(ValueError, match=r"workers, which call every action, got .* Use GPUs"):
            pykern.Pipeline([nn.Linear(2, 2)], devices="cpu", microbatches=1, capture=capture)


@pytest.mark.parametrize("capture", ["yes", None, 2])
def test_other_values_of_capture_are_refused(capture: Any) -> None:
    with pytest.raises(ValueError, match=f"or 'step', got {capture!r}"):
        pykern.Pipeline([nn.Linear(2, 2)], devices="cpu", microbatches=1, capture=capture)


def test_several_replicas_are_refused_at_once(gpus: FakeCuda) -> None:
    case = CASES["mlp"](ROWS)
    with pytest.raises(RuntimeError, match="several replicas cannot be captured"):
        captured(case, schedules.chimera(2, 4))


def test_layers_that_never_stay_the_same_are_told(gpus: FakeCuda) -> None:
    class Counts(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().forward(x)

    layer = Counts(4, 4)
    layer.count = 1
    case = Case(nn.Sequential(layer), torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)
    with captured(case, schedules.gpipe(1, 4)) as pipe:
        for _ in range(4):
            pipe.step(case.inputs, target=case.target)
        with pytest.raises(RuntimeError, match="layers change in every step"):
            pipe.step(case.inputs, target=case.target)

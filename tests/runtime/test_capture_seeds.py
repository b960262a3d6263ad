"""Graph mode with the dropout of kernels: every replay draws what a call would."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.kernels import seeds
from pykern.kernels.dropout import dropout
from pykern.runtime.gpu.capture.refusals import CannotCapture
from pykern.runtime.random.eager import OwnState, Repeat
from pykern.runtime.random.seed import StepSeed
from pykern.runtime.stage.stage import Stage
from pykern.torch_private import interceptor
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus, unchecked_gpus
from tests.runtime.models import Case, mlp
from tests.runtime.test_capture import ROWS, steps


class Drop(nn.Module):
    """Drops twice, so that a forward has two seeds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = dropout(torch.tanh(self.linear(x)), 0.5, self.training)
        return x + dropout(hidden * 2, 0.25, self.training)


def case() -> Case:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 8), Drop(8), nn.Linear(8, 8), Drop(8), nn.Linear(8, 8))
    return Case(layers, torch.randn(ROWS, 8), torch.randn(ROWS, 8), F.mse_loss)


def test_no_generator_is_asked_in_a_capture() -> None:
    """One of a GPU refuses; attention would ask it, dropout or not."""
    modes: list[object] = []

    class Notes(Drop):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(interceptor())
            return super().forward(x)

    stage, following = Stage(0, [Notes(8)]), Stage(1, ())
    stage.next, following.previous = following, stage
    for provided in (False, False, True):
        for one in (stage, following):
            one.begin(1, StepSeed(), lambda *_: ((), ()), ["stage"])
        stage.arguments = [(torch.randn(2, 8),)]
        with seeds.provided(torch.arange(2)) if provided else nullcontext():
            stage.forward(0)
            stage.recompute(0)
    # The first is watched as well.
    assert [type(mode) for mode in modes[2:4]] == [OwnState, Repeat]
    assert modes[4:] == [None, None]


@pytest.mark.parametrize(
    ("name", "recompute", "capture"),
    [
        ("one_f_one_b", None, True),
        ("one_f_one_b", "stage", "auto"),
        ("gpipe", "layer", True),
        ("zb_h1", None, "step"),
    ],
)
def test_replays_draw_what_calls_would(
    gpus: FakeCuda, name: str, recompute: object, capture: object
) -> None:
    dropping = case()
    plain = copy.deepcopy(dropping.layers)
    with pykern.Pipeline(
        dropping.layers,
        devices=["cuda:0", "cuda:1"],
        schedule=schedules.by_name[name](2, 4),
        loss_fn=dropping.loss_fn,
        capture=capture,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
    ) as pipe:
        torch.manual_seed(7)
        steps(pipe, plain, dropping, 5)
        assert gpus.calls("cuGraphLaunch") > 0


def run(capture: bool) -> tuple[list[Tensor], Tensor]:
    """The losses of some steps, and how far the caller's generator has come."""
    dropping = case()
    with pykern.Pipeline(
        dropping.layers,
        devices=["cuda:0"],
        microbatches=4,
        loss_fn=dropping.loss_fn,
        capture=capture,
    ) as pipe:
        torch.manual_seed(7)
        losses = [pipe.step(dropping.inputs, target=dropping.target).clone() for _ in range(4)]
    return losses, torch.get_rng_state()


def test_the_callers_generator_goes_on_as_without_graphs() -> None:
    with unchecked_gpus(1):
        called, expected = run(capture=False)
        replayed, state = run(capture=True)
    assert len({loss.item() for loss in called}) == 4
    assert all(torch.equal(one, other) for one, other in zip(called, replayed, strict=True))
    assert torch.equal(state, expected)


def test_other_steps_in_between_change_nothing(gpus: FakeCuda) -> None:
    dropping = case()
    plain = copy.deepcopy(dropping.layers)
    with pykern.Pipeline(
        dropping.layers,
        devices=["cuda:0"],
        microbatches=4,
        loss_fn=dropping.loss_fn,
        capture=True,
    ) as pipe:
        torch.manual_seed(7)
        steps(pipe, plain, dropping, 3)
        launches = gpus.calls("cuGraphLaunch")
        state = torch.get_rng_state()
        pipe(dropping.inputs)
        torch.set_rng_state(state)
        steps(pipe, plain, dropping, 3)
        assert gpus.calls("cuGraphLaunch") > launches


def test_dropout_of_torch_beside_it_is_refused(gpus: FakeCuda) -> None:
    dropping = case()
    layers = nn.Sequential(*dropping.layers, nn.Dropout(0.5))
    with pykern.Pipeline(
        layers, devices=["cuda:0"], microbatches=4, loss_fn=F.mse_loss, capture=True
    ) as pipe:
        pipe.step(dropping.inputs, target=dropping.target)
        with pytest.raises(CannotCapture, match=r"Dropout \(.* draws random numbers"):
            pipe.step(dropping.inputs, target=dropping.target)


@pytest.mark.parametrize("capture", [True, "auto"])
def test_a_kernel_that_draws_unseen_is_not_captured(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, capture: Any
) -> None:
    """A step has moved a generator, although no layer is known to draw."""
    offsets = itertools.count()
    monkeypatch.setattr(HostGpus, "generators", lambda _: [next(offsets)])
    plain = mlp(ROWS)
    told = "a kernel of which torch knows nothing draws random numbers"
    refused = pytest.raises(CannotCapture, match=told)
    with plain.pipeline(schedules.one_f_one_b(2, 4), "cuda", capture=capture) as pipe:
        pipe.step(plain.inputs, target=plain.target)
        with refused if capture is True else pytest.warns(UserWarning, match=told):
            pipe.step(plain.inputs, target=plain.target)
        assert gpus.calls("cuGraphLaunch") == 0


def losses(pipe: pykern.Pipeline, of: Case) -> list[float]:
    found = []
    for number in range(3):
        torch.manual_seed(number)
        found.append(pipe.step(of.inputs, target=of.target).item())
        with torch.no_grad():
            pipe(of.inputs)
    return found


def test_forwards_alone_between_steps_change_no_seeds() -> None:
    one = case()
    other = copy.deepcopy(one)
    plan = schedules.one_f_one_b(2, 4)
    with unchecked_gpus(2) as fake:
        with one.pipeline(plan, "cuda", capture=True) as pipe, other.pipeline(plan) as calls:
            assert losses(pipe, one) == losses(calls, one)
            assert fake.calls("cuGraphLaunch") > 0
        del pipe


@pytest.mark.parametrize("with_grad", [False, True])
def test_a_forward_alone_before_the_second_step_keeps_nothing_from_being_captured(
    gpus: FakeCuda, with_grad: bool
) -> None:
    plain = mlp(ROWS)
    with plain.pipeline(schedules.one_f_one_b(2, 4), "cuda", capture=True) as pipe:
        pipe.step(plain.inputs, target=plain.target)
        with torch.set_grad_enabled(with_grad):
            pipe(plain.inputs)
        pipe.step(plain.inputs, target=plain.target)
        assert gpus.calls("cuGraphLaunch") > 0

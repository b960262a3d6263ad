"""Graph mode with the dropout of kernels: every replay draws what a call would."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.kernels.dropout import dropout
from pykern.runtime.obstacles import CannotCapture
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import unchecked_gpus
from tests.runtime.models import Case
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


def test_dropout_of_torch_beside_it_is_refused(gpus: FakeCuda) -> None:
    dropping = case()
    layers = nn.Sequential(*dropping.layers, nn.Dropout(0.5))
    with pykern.Pipeline(
        layers, devices=["cuda:0"], microbatches=4, loss_fn=F.mse_loss, capture=True
    ) as pipe:
        pipe.step(dropping.inputs, target=dropping.target)
        with pytest.raises(CannotCapture, match=r"Dropout \(.* draws random numbers"):
            pipe.step(dropping.inputs, target=dropping.target)

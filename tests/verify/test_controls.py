"""Differences between a pipeline and its plain model are found, and named."""

import copy
import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from tests.support.pipelines import small
from tests.verify import broken
from tests.verify.broken import WIDTH

X, Y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)


def chain(bad: type[nn.Module], place: int = 3) -> nn.Sequential:
    """Six layers in three stages of two, one of them bad."""
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    layers[place] = bad(WIDTH, WIDTH)
    return nn.Sequential(*layers)


def pipeline(model: nn.Sequential, **options: object) -> pykern.Pipeline:
    return small(model, **({"devices": "cpu:3", "microbatches": 3, "verify": True} | options))


def found(model: nn.Sequential, **options: object) -> pykern.VerifyError:
    """The error of the first step."""
    with pipeline(model, **options) as pipe, pytest.raises(pykern.VerifyError) as caught:
        pipe.step(X, target=Y)
    return caught.value


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1", "hanayo"])
@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
def test_every_way_to_run_a_backward_is_looked_at(schedule: str, recompute: Any) -> None:
    model = chain(broken.WrongInputGradient, 5)
    error = found(model, devices="cpu:2", schedule=schedule, recompute=recompute)
    assert error.origin.boundary == ((3, 2) if schedule == "hanayo" else (1, 0))
    assert error.origin.microbatch == 0


@pytest.mark.parametrize(
    ("bad", "boundary", "microbatch", "name"),
    [
        (broken.WrongForward, (1, 2), 0, "3.weight"),
        (broken.WrongInputGradient, (1, 0), 0, "2.weight"),
        (broken.WritesBufferInBackward, (1, 2), 1, "2.weight"),
        (broken.CountsElsewhere, (1, 2), 0, "2.weight"),
        (broken.ReadsTheClock, (1, 2), 0, "3.weight"),
    ],
)
def test_the_boundary_is_named(
    bad: type[nn.Module], boundary: tuple[int, int], microbatch: int, name: str
) -> None:
    error = found(chain(bad), schedule="gpipe")
    assert error.origin.stage == 1
    assert error.origin.boundary == boundary
    assert error.origin.microbatch == microbatch
    assert error.stage == 1
    assert "layers '2' to '3'" in str(error)
    # The stage gives on wrong tensors, so its first parameter may have a wrong gradient as well.
    assert error.first.kind == "gradient"
    assert error.layer in {"2", "3"}
    assert name in {one.name for one in error.differences}


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize("place", range(6))
def test_a_wrong_gradient_of_a_parameter_is_found_in_its_layer(schedule: str, place: int) -> None:
    error = found(chain(broken.WrongWeightGradient, place), schedule=schedule)
    assert [one.name for one in error.differences] == [f"{place}.bias"]
    assert (error.stage, error.layer) == (place // 2, str(place))
    assert (error.origin.stage, error.origin.boundary) == (place // 2, None)
    assert error.first.num_values == WIDTH
    # Each of three microbatches has added 1.
    assert error.first.max_abs == pytest.approx(3)
    assert re.search(rf"gradient '{place}.bias': 8 of 8 values differ, by 3 ", str(error))


def test_an_absent_gradient_is_told() -> None:
    error = found(chain(broken.NoWeightGradient))
    assert [one.name for one in error.differences] == ["3.bias"]
    assert "gradient '3.bias': the pipeline's is absent (stage 1, layer '3')" in str(error)


def test_a_buffer_is_found_in_its_layer() -> None:
    error = found(chain(broken.WrongBuffer, 4))
    assert [(one.kind, one.name) for one in error.differences] == [("buffer", "4.count")]
    assert (error.stage, error.layer, error.origin.stage) == (2, "4", 2)


def test_the_last_stage_is_found_by_its_loss() -> None:
    error = found(chain(broken.WrongForward, 5))
    assert error.differences[0].kind == "loss"
    assert (error.origin.stage, error.origin.boundary) == (2, None)
    assert (error.stage, error.layer) == (2, "4")


def test_a_generator_of_all_layers_is_found() -> None:
    layers = [broken.DrawsFromPython(WIDTH, WIDTH) for _ in range(2)]
    # One worker runs both stages, two microbatches of the first before one of the second.
    plan = schedules.breadth_first(1, 2, num_chunks=2)
    assert str(plan).index("0F1") < str(plan).index("1F0")
    with pykern.Pipeline(
        layers, devices="cpu:1", schedule=plan, loss_fn=F.mse_loss, verify=True
    ) as pipe:
        with pytest.raises(pykern.VerifyError) as caught:
            pipe.step(X, target=Y)
        assert (caught.value.origin.boundary, caught.value.origin.microbatch) == ((0, 1), 1)


def test_what_does_not_come_again_is_told() -> None:
    broken.ForgetsOnce.told = False
    error = found(chain(broken.ForgetsOnce))
    assert error.origin.stage is None
    assert "did not recur" in str(error)


def test_what_only_the_plain_model_raises_is_told() -> None:
    error = found(chain(broken.RaisesHere))
    assert isinstance(error.__cause__, LookupError)
    assert "the plain model" in str(error)


def test_outputs_are_compared_as_well() -> None:
    with pipeline(chain(broken.WrongForward, 1)) as pipe:
        with pytest.raises(pykern.VerifyError, match="forward 1 of the pipeline") as caught:
            pipe(X)
        assert caught.value.first.kind == "output"
        assert caught.value.first.num_values == 3 * WIDTH
        assert caught.value.origin.boundary == (0, 1)


class Skips(nn.Module):
    """A value goes past a stage, which gives on another one that is wrong."""

    def __init__(self, bad: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b = bad(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        early = self.a(x)
        late: Tensor = self.c(self.b(early.tanh()) + early)
        return late


@pytest.mark.parametrize(
    ("bad", "boundary"), [(broken.WrongForward, (1, 2)), (broken.WrongInputGradient, (1, 0))]
)
def test_the_boundary_of_a_recorded_model_is_named(
    bad: type[nn.Module], boundary: tuple[int, int]
) -> None:
    with pykern.Pipeline(
        Skips(bad),
        devices="cpu:3",
        microbatches=3,
        loss_fn=F.mse_loss,
        sample=X[:2],
        split_at=["b", "c"],
        verify=True,
    ) as pipe:
        with pytest.raises(pykern.VerifyError) as caught:
            pipe.step(X, target=Y)
        assert caught.value.origin.boundary == boundary
        assert caught.value.origin.stage == 1


class Forgets(nn.Module):
    """Its forward depends on something that no recording sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) * float(os.environ.get("FACTOR", "1"))
        return y


def test_a_recording_that_is_not_the_forward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pykern.Pipeline(
        Forgets(), devices="cpu:2", microbatches=3, loss_fn=F.mse_loss, sample=X[:2], verify=1
    ) as pipe:
        pipe.step(X, target=Y)
        monkeypatch.setenv("FACTOR", "2")
        with pytest.raises(pykern.VerifyError, match="not in the recording"):
            pipe.step(X, target=Y)


def test_after_an_error_all_is_as_after_the_step() -> None:
    model = chain(broken.WritesBufferInBackward)
    other = copy.deepcopy(model)
    with pipeline(model, schedule="gpipe", verify=2) as pipe:
        torch.manual_seed(3)
        with pytest.raises(pykern.VerifyError):
            pipe.step(X, target=Y)
        state = torch.get_rng_state()
        gradients = [parameter.grad for parameter in pipe.parameters()]
        # Nobody looks at this one, and the next fails again.
        loss = pipe.step(X, target=Y)
        with pytest.raises(pykern.VerifyError, match="step 3"):
            pipe.step(X, target=Y)
    with pipeline(other, schedule="gpipe", verify=False) as pipe:
        torch.manual_seed(3)
        pipe.step(X, target=Y)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(pipe.step(X, target=Y), loss)
        pipe.step(X, target=Y)
    for one, two, first in zip(model.parameters(), other.parameters(), gradients, strict=True):
        assert one.grad is first
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)
    assert torch.equal(model[3].scale, other[3].scale)  # type: ignore[arg-type]


def test_bounds_hold_what_is_near() -> None:
    loose = pykern.Verify(rtol=0.1, atol=10)
    with pipeline(chain(broken.WrongWeightGradient), verify=loose) as pipe:
        pipe.step(X, target=Y)
    near = pykern.Verify(atol=2.5)
    error = found(chain(broken.WrongWeightGradient), verify=near)
    assert error.first.name == "3.bias"

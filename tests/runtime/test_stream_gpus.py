"""A stream of batches on the fake driver."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.runtime.models import CASES

SIZES = (11, 3, 1, 8, 2, 6)


@pytest.mark.parametrize(
    "plan",
    [schedules.one_f_one_b(3, 4), schedules.hanayo(2, 4, 1), schedules.forward_only(2, 2, 2)],
    ids=["one_f_one_b", "hanayo", "looped"],
)
def test_outputs_are_those_of_each_batch_alone(gpus: FakeCuda, plan: Plan) -> None:
    case = CASES["mlp"](11)
    devices = [f"cuda:{device}" for device in range(plan.num_devices)]
    with pykern.Pipeline(case.layers, devices=devices, schedule=plan) as pipe:
        batches = [case.inputs[:rows] for rows in SIZES]
        expected = [pipe(batch) for batch in batches]
        outputs = list(pipe.stream(batches))
        assert len(outputs) == len(expected)
        assert all(map(torch.equal, outputs, expected))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that are fed from now on, and those that are waited for, as they come."""
    marks: list[str] = []
    mark, follow = HostGpus.mark, HostGpus.follow

    def noted_mark(self: HostGpus) -> list[tuple[int, Tensor]]:
        marks.append("fed")
        return mark(self)

    def noted_follow(self: HostGpus, *given: Any) -> None:
        marks.append("taken")
        follow(self, *given)

    monkeypatch.setattr(HostGpus, "mark", noted_mark)
    monkeypatch.setattr(HostGpus, "follow", noted_follow)
    return marks


def test_batches_are_issued_ahead_and_the_caller_waits_for_one(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`follow` reads what `mark` has written; each batch left behind is waited for as well."""
    marks = noted(monkeypatch)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pykern.Pipeline(layers, devices=["cuda:0", "cuda:1"], microbatches=2) as pipe:
        batch = torch.randn(4, 4)
        with torch.no_grad():
            pipe(batch)
        stream = pipe.stream(iter(lambda: batch, None))
        next(stream)
        assert marks == ["fed"] * 3 + ["taken"]
        with pytest.raises(RuntimeError, match="streaming"):
            pipe(batch)
        next(stream)
        assert marks[4:] == ["fed", "taken"]
        stream.close()
        assert marks[6:] == ["taken"] * 2
        assert torch.equal(pipe(batch), next(pipe.stream([batch])))


def test_a_failing_stage_comes_after_the_outputs_before_it(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = noted(monkeypatch)
    error = ValueError("planted")

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] < 0:
                raise error
            return x + 1

    with pykern.Pipeline([Fails(), Fails()], devices=["cuda:0", "cuda:1"], microbatches=2) as pipe:
        batches = [torch.full((2, 2), value) for value in (0.0, 1.0, -2.0, 3.0)]
        pipe(batches[0])
        outputs = []
        with pytest.raises(ValueError, match="planted") as caught:
            outputs += [output[0, 0].item() for output in pipe.stream(iter(batches))]
        assert caught.value is error
        # The caller waits for what has failed as well: copies of its batch may be under way.
        assert marks.count("fed") == marks.count("taken") == 3
        caught.value.__traceback__ = None
        assert torch.equal(pipe(batches[0]), batches[0] + 2)

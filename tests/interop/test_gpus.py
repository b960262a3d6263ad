"""Stages on GPUs: the fake driver checks each access of a real step."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pykern.interop import pipelining
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import host_gpus
from tests.interop.cases import OURS as ON_WORKERS
from tests.interop.cases import Outcome, batch, expect_same, gradients_of, loss_fn, parts, step


@pytest.fixture
def gpus() -> Iterator[FakeCuda]:
    """Two GPUs; in the end no rule is broken and nothing is left."""
    with host_gpus(2) as fake:
        yield fake


class Shifted(nn.Module):
    """Takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parts(1)[0]

    def forward(self, x: Tensor, *, shift: Tensor) -> tuple[Tensor]:
        return (self.inner(x) + shift,)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_stages_are_dealt_to_the_gpus_they_name(name: str, gpus: FakeCuda) -> None:
    x, y = batch()
    modules = [Shifted(), *parts(2), Shifted()]
    shift = torch.linspace(0.0, 1.0, 8).double()[:, None]
    modules[3] = nn.Sequential(*parts(1))
    expected = step(ON_WORKERS, name, modules, x, target=y, shift=shift)
    stages = [
        pipelining.PipelineStage(module, index, 4, torch.device("cuda", index % 2))
        for index, module in enumerate(modules)
    ]
    schedule = pipelining.get_schedule_class(name)(stages, 4, loss_fn=loss_fn)
    assert len(schedule.pipeline_order) == 2
    losses: list[Tensor] = []
    output = schedule.step(x, target=y, shift=shift, losses=losses)
    expect_same(Outcome(output, losses, gradients_of(modules)), expected)


def test_a_recorded_model(gpus: FakeCuda) -> None:
    x, y = batch()
    model = nn.Sequential(*parts(4))
    splits = {name: pipelining.SplitPoint.BEGINNING for name in ("1", "2", "3")}
    pipe = pipelining.pipeline(model, (x[:2],), split_spec=splits)
    stages = [pipe.build_stage(index, torch.device("cuda", index % 2)) for index in range(4)]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_fn)
    losses: list[Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    ours = Outcome(output, losses, gradients_of([model]))
    expect_same(ours, step(ON_WORKERS, "Interleaved1F1B", parts(4), x, target=y))


def test_each_rank_has_a_current_device(gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", pipelining.ranks.get_rank)
    x, y = batch()

    def main() -> str:
        rank = pipelining.ranks.get_rank()
        stage = pipelining.PipelineStage(parts(2)[rank], rank, 2, torch.device("cuda"))
        schedule = pipelining.Schedule1F1B(stage, 2, loss_fn=loss_fn)
        schedule.step(x, target=y)
        return stage.lane

    assert pipelining.run(main, 2) == ["cuda:0", "cuda:1"]


def test_stages_of_one_device_must_name_it(gpus: FakeCuda) -> None:
    stages = [
        pipelining.PipelineStage(module, index, 4, torch.device("cuda", index // 2))
        for index, module in enumerate(parts(4))
    ]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_fn)
    x, y = batch()
    with pytest.raises(
        ValueError,
        match=r"stage 2 must be on .*, where the schedule runs it with others, got cuda:1",
    ):
        schedule.step(x, target=y)

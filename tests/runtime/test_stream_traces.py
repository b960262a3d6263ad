"""The times of a traced step on GPUs: on the fake driver, which keeps its own time, as
simulated."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Action, Costs, Kind, Plan, Timeline, lower, simulate
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.support.pipelines import planned

FORWARD_NS = 1000.0
BACKWARD_NS = 2300.0
COPY_NS = 400.0

PLANS = {
    "gpipe": schedules.gpipe(4, 6),
    "one_f_one_b": schedules.one_f_one_b(4, 6),
    "interleaved": schedules.interleaved(3, 6, 2),
    "hanayo": schedules.hanayo(3, 6, 2),
}


class Paced(torch.autograd.Function):
    """Says how long its action takes, a little longer on each stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: int) -> Tensor:
        ctx.stage = stage
        HostGpus.duration_ns = FORWARD_NS + 10 * stage
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        HostGpus.duration_ns = BACKWARD_NS + 30 * ctx.stage
        return gradient.clone(), None


class Layer(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Paced.apply(self.scale * x, self.stage)


@pytest.fixture
def paced(gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    gpus.set_copy_cost(COPY_NS, float("inf"))
    monkeypatch.setattr(HostGpus, "duration_ns", HostGpus.duration_ns)
    return gpus


def layers_of(plan: Plan) -> nn.Sequential:
    return nn.Sequential(*(Layer(stage) for stage in range(plan.num_stages)))


def traced(pipe: pykern.Pipeline) -> None:
    x = torch.ones(12, 3)
    pipe.step(x, target=x)
    with pipe.tracing():
        pipe.step(x, target=x)


def predicted(plan: Plan) -> Timeline:
    stages = range(plan.num_stages)
    forward = [FORWARD_NS + 10 * stage for stage in stages]
    return simulate(plan, Costs(forward, [BACKWARD_NS + 30 * s for s in stages], COPY_NS))


def spans(timeline: Timeline) -> list[list[tuple[Action, float, float]]]:
    return [[(span.action, span.start_ns, span.end_ns) for span in row] for row in timeline.rows]


def close(row: list[tuple[Action, float, float]]) -> list[Any]:
    """Elapsed times are single precision in milliseconds."""
    return [
        (action, pytest.approx(start, abs=0.01), pytest.approx(end, abs=0.01))
        for action, start, end in row
    ]


@pytest.mark.parametrize("name", PLANS)
def test_on_one_clock_a_step_takes_what_the_simulator_says(paced: FakeCuda, name: str) -> None:
    plan = PLANS[name]
    with planned(layers_of(plan), plan, devices=["cuda:0"] * plan.num_devices) as pipe:
        traced(pipe)
        measured, expected = spans(pipe.timeline()), spans(predicted(plan))
        assert measured == [close(row) for row in expected]
        assert spans(pipe.prediction()) == [close(row) for row in expected]


@pytest.mark.parametrize("name", PLANS)
def test_on_several_each_row_is_right_but_for_where_its_clock_began(
    paced: FakeCuda, name: str
) -> None:
    plan = PLANS[name]
    with planned(layers_of(plan), plan, devices="cuda") as pipe:
        traced(pipe)
        measured, expected = spans(pipe.timeline()), spans(predicted(plan))
        for row, right in zip(measured, expected, strict=True):
            late = row[0][1] - right[0][1]
            assert row == close(
                [(action, late + start, late + end) for action, start, end in right]
            )


@pytest.mark.parametrize("name", PLANS)
def test_every_copy_is_timed_between_its_ends(paced: FakeCuda, name: str) -> None:
    plan = PLANS[name]
    with planned(layers_of(plan), plan, devices=["cuda:0"] * plan.num_devices) as pipe:
        traced(pipe)
        timeline, copies = pipe.timeline(), pipe.copies()
        lowered = [copy.action for lane in lower(plan).lanes for copy in lane.copies]
    spans_of = {span.action: span for row in timeline.rows for span in row}
    found = [span for row in copies.rows for span in row]
    assert sorted(map(str, lowered)) == sorted(str(span.action) for span in found)
    for span in found:
        forward = span.action.kind == Kind.COPY_F
        kind, next_stage = (Kind.F, 1) if forward else (Kind.B, -1)
        stage, microbatch = span.action.stage, span.action.microbatch
        assert span.start_ns >= spans_of[Action(kind, stage, microbatch)].end_ns - 0.01
        assert span.end_ns - span.start_ns == pytest.approx(COPY_NS, abs=0.01)
        assert span.end_ns <= spans_of[Action(kind, stage + next_stage, microbatch)].start_ns + 0.01
    for row in copies.rows:
        assert len({span.action.kind for span in row}) == 1
        assert all(a.end_ns <= b.start_ns + 0.01 for a, b in itertools.pairwise(row))


def test_threads_that_have_not_used_a_gpu_trace_and_read_traces(paced: FakeCuda) -> None:
    plan = schedules.gpipe(2, 4)
    with planned(layers_of(plan), plan, devices="cuda") as pipe, ThreadPoolExecutor(1) as other:
        other.submit(traced, pipe).result()
    with ThreadPoolExecutor(1) as another:
        assert another.submit(pipe.timeline).result().makespan_ns > 0
        assert another.submit(pipe.copies).result().makespan_ns > 0


def test_slow_copies_are_in_the_prediction(paced: FakeCuda) -> None:
    plan = schedules.gpipe(2, 4)
    with planned(layers_of(plan), plan, devices=["cuda:0"] * 2) as pipe:
        paced.set_copy_cost(900, float("inf"))
        traced(pipe)
        assert pipe.prediction().makespan_ns == pytest.approx(pipe.timeline().makespan_ns, abs=0.1)


def test_only_a_step_within_tracing_is_timed(paced: FakeCuda) -> None:
    plan = schedules.gpipe(2, 4)
    with planned(layers_of(plan), plan, devices=["cuda:0"] * 2) as pipe:
        with pytest.raises(RuntimeError, match="there are no copies yet"):
            pipe.copies()
        x = torch.ones(12, 3)
        pipe.step(x, target=x)
        for asked in (pipe.timeline, pipe.copies, pipe.prediction):
            with pytest.raises(RuntimeError, match="no step has been traced"):
                asked()
        with pipe.tracing():
            pipe.step(x, target=x)
        first = pipe.timeline()
        pipe.step(x, target=x)
        assert pipe.timeline() == first


def test_cpu_workers_copy_nothing() -> None:
    x = torch.ones(12, 3)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pykern.Pipeline(
        layers, devices="cpu:2", microbatches=2, loss_fn=nn.functional.mse_loss
    ) as pipe:
        pipe.step(x, target=x)
        assert pipe.copies() == Timeline([])


def test_the_guide_to_gpus_runs(
    gpus: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", guide, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    events = json.loads((tmp_path / "step.trace.json").read_text())["traceEvents"]
    # There are 8 stages and 16 microbatches: F and B of each, and both copies over each of 7
    # boundaries.
    assert sum(event["ph"] == "X" for event in events) == 16 * 2 * (8 + 7)

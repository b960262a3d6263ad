"""Profiles by the real torch.profiler, against the runtime's timeline."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pykern
from pykern.kineto import read
from pykern.kineto.chrome_trace import events_of
from pykern.kineto.ranges import steps_of
from pykern.plan import Action, Kind, Timeline, lower
from pykern.recorded.profile import plan_of, timeline_of
from pykern.runtime import profiled as runtime_profiled
from pykern.schedules import interleaved, one_f_one_b, zb_h1
from pykern.torch_private import profiler
from tests.support import programs
from tests.support.recordings import assert_last_as_long, times_of

ROOT = Path(__file__).parents[2]
NUM_STEPS = 3


@contextmanager
def profiled(path: Path, *, all_threads: bool) -> Iterator[None]:
    """Writes a trace of what runs within."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, experimental_config=config, acc_events=True) as found:
        yield
    found.export_chrome_trace(str(path))


@dataclass
class Recording:
    """The trace of some steps, and the last of them as the runtime saw it."""

    path: Path
    timeline: Timeline

    def last(self) -> Timeline:
        """The last step of the trace."""
        return timeline_of(steps_of(events_of(self.path))[-1])


@pytest.fixture(scope="module", params=[True, False], ids=["all threads", "the caller's thread"])
def recorded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("kineto") / "step.json.gz"
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    batch = torch.randn(128, 256)
    options: dict[str, Any] = {"devices": "cpu:2", "microbatches": 4, "num_chunks": 2}
    loss_fn = nn.functional.mse_loss
    with pykern.Pipeline(layers, schedule="interleaved", loss_fn=loss_fn, **options) as pipe:
        pipe.step(batch, target=batch)
        with profiled(path, all_threads=request.param):
            for _ in range(NUM_STEPS):
                pipe.step(batch, target=batch)
        # No longer recorded.
        timeline = pipe.timeline()
        pipe.step(batch, target=batch)
    return Recording(path, timeline)


def test_each_action_is_there_once_and_lasts_as_long(recorded):
    assert_last_as_long(times_of(recorded.last()), times_of(recorded.timeline))


def test_the_plan_and_the_steps_are_read_back(recorded):
    assert plan_of(recorded.last()) == interleaved(2, 4, num_chunks=2)
    report = read(recorded.path)
    assert report.seen.num_steps == NUM_STEPS
    assert report.more == []
    assert f"{NUM_STEPS} steps in 4 microbatches, 4 stages on 2 devices" in report.summary()


@pytest.mark.parametrize("all_threads", [True, False])
def test_a_loss_outside_is_one_step(tmp_path, all_threads):
    batch = torch.randn(8, 4)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    with (
        pykern.Pipeline(layers, devices="cpu:2", microbatches=2, schedule="zb_h1") as pipe,
        profiled(tmp_path / "step.json", all_threads=all_threads),
    ):
        pipe(batch).sum().backward()
    report = read(tmp_path / "step.json")
    assert report.seen.num_steps == 1
    kinds = Counter(action.kind for row in report.seen.plan.rows for action in row)
    of_plan = Counter(action.kind for row in zb_h1(2, 2).rows for action in row)
    assert kinds == of_plan


def test_the_range_of_an_action_holds_its_operators(tmp_path):
    """A row of a trace is a thread: an operator lies within the action that called it."""
    batch = torch.randn(8, 4)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    loss_fn = nn.functional.mse_loss
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=loss_fn) as pipe:
        for _ in range(3):
            pipe.step(batch, target=batch)
        with profiled(tmp_path / "step.json", all_threads=True):
            pipe.step(batch, target=batch)
    events = events_of(tmp_path / "step.json")
    forwards = [event for event in events if event.name.startswith("pykern F ")]
    linears = [event for event in events if event.name == "aten::linear"]
    assert len(forwards) == len(linears) == 4
    for linear in linears:
        owners = [
            one for one in forwards
            if one.start_ns <= linear.start_ns and linear.end_ns <= one.end_ns
        ]  # fmt: skip
        assert owners


def test_a_stage_that_raises_ends_its_range(tmp_path):
    class Raises(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise ValueError("the second call")
            return super().forward(x)

    batch, layers = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), Raises(4, 4))
    loss_fn = nn.functional.mse_loss
    with (
        pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=loss_fn) as pipe,
        profiled(tmp_path / "step.json", all_threads=True),
    ):
        with pytest.raises(ValueError, match="the second call"):
            pipe.step(batch, target=batch)
        pipe.step(batch, target=batch)
    names = [one.name for one in events_of(tmp_path / "step.json") if "pykern" in one.name]
    # The action that failed has a range, and no backward of it.
    assert names.count("pykern step") == 2
    assert names.count("pykern F s1 mb1 dev1") == 2
    assert names.count("pykern B s1 mb1 dev1") == 1


def test_a_step_asks_once_whether_it_is_recorded(monkeypatch):
    asked: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(profiler, name)

    monkeypatch.setattr(runtime_profiled, "profiler", Watched())
    batch, layers = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss_fn = nn.functional.mse_loss
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=8, loss_fn=loss_fn) as pipe:
        pipe.step(batch, target=batch)
    assert asked == ["is_recording"]


# Two steps on GPUs of the fake driver, whose actions the caller issues.
GPU_PROGRAM = """
import sys
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
import pykern
from pykern.runtime.gpu import cuda
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus

HostGpus.fake = FakeCuda(2)
HostGpus.fake.allow_undeclared()
cuda.Gpus = HostGpus
torch.version.cuda = "13.0"
torch.cuda.device_count = lambda: 2
layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
pipe = pykern.Pipeline(layers, devices="cuda", microbatches=4, loss_fn=nn.functional.mse_loss,
                       balance="layers")
with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
    for _ in range(2):
        pipe.step(torch.ones(8, 3), target=torch.ones(8, 3))
pipe.close()
found.export_chrome_trace(sys.argv[1])
"""


def test_on_gpus_every_action_and_copy_has_a_range(tmp_path):
    path = tmp_path / "step.json"
    done = programs.run(GPU_PROGRAM, str(path), folder=ROOT)
    assert done.returncode == 0, done.stderr
    plan, steps = one_f_one_b(2, 4), steps_of(events_of(path))
    actions = [(device, one) for device, row in enumerate(plan.rows) for one in row]
    copies = [(lane.sender, copy.action) for lane in lower(plan).lanes for copy in lane.copies]
    assert {one.kind for _, one in copies} == {Kind.COPY_F, Kind.COPY_B}
    once: Counter[tuple[int, Action]] = Counter(actions + copies)
    for step in steps:
        assert Counter((one.device, one.action) for one in step.ran) == once
    assert len(steps) == 2
    assert read(path).seen.plan == plan

"""`pipe.profile`: a run's own causes, and a model that is as before."""

import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pykern
from pykern import cgroup
from pykern.pipeline.host_waits import host_waits_of
from pykern.pipeline.pipeline import Pipeline
from pykern.pipeline.timed_steps import TimedStep, core_share
from pykern.plan import Action, Kind, Span, Timeline
from pykern.profiling import Report
from pykern.profiling.causes import causes_of
from pykern.runtime.stage.stage import Run, Stage
from tests.fake_cuda.host_gpus import host_gpus

# Far longer than a busy machine lets a thread wait.
SLEEP_S = 0.05
# Python hashes so many without the interpreter lock.
BYTES = bytes(2**20)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Sleeps(nn.Linear):
    """A layer that takes long on any machine."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_S)
        return super().forward(x)


def pipeline(*layers: nn.Module, **more: object) -> Pipeline:
    settings = {"devices": "cpu:2", "microbatches": 6, "loss_fn": mse_loss}
    return Pipeline(nn.Sequential(*layers), **(settings | more))  # type: ignore[arg-type]


def test_a_stage_that_sleeps_is_named_first() -> None:
    x = torch.randn(6, 4)
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4), Sleeps(4, 4), Sleeps(4, 4)) as pipe:
        report = pipe.profile(x, target=x, steps=2)
    assert report.first_cause == "imbalance of stages"
    assert report.causes.found[0].remedy.startswith("stage 1 takes ")
    assert report.changes[0].name == "balance=[3, 1]"


def test_a_slow_device_is_named_first() -> None:
    def slow(kind: Kind, stage: Stage, call: Run) -> Run:
        def run(microbatch: int) -> None:
            time.sleep(SLEEP_S)
            call(microbatch)

        return run if stage.index == 0 and kind is Kind.F else call

    x = torch.randn(6, 4)
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4)) as pipe:
        pipe._executor.watch(slow)
        report = pipe.profile(x, target=x, steps=2)
    assert report.first_cause == "slow device"
    assert report.causes.found[0].remedy.startswith("device 0 takes ")


def test_the_model_is_as_before() -> None:
    torch.manual_seed(3)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)
    x = torch.randn(12, 4)
    with pipeline(*layers) as pipe:
        pipe.step(x, target=x)
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        gradients = [p.grad for p in pipe.parameters()]
        values = [None if g is None else g.clone() for g in gradients]
        numbers = torch.get_rng_state()
        torch.set_num_threads(2)
        report = pipe.profile(x, target=x, steps=1)
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), numbers)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        for parameter, gradient, value in zip(pipe.parameters(), gradients, values, strict=True):
            assert parameter.grad is gradient
            assert value is not None
            assert torch.equal(gradient, value)  # type: ignore[arg-type]
        assert pipe.training
    assert report.seen.torch_threads == 2
    assert report.seen.one_thread is not None


class Own(nn.Module):
    """A model with a forward of its own, which is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.b(self.a(x).relu() + x).square().mean()


def test_a_recorded_model_with_tokens_is_profiled_with_its_layers() -> None:
    ids = torch.randint(9, (6, 5))
    with Pipeline(
        Own(), devices="cpu:2", microbatches=3, loss_fn=lambda loss: loss, sample=ids[:2]
    ) as pipe:
        report = pipe.profile(ids, steps=1)
        assert len(report.seen.layer_ns) == len(pipe.partition.layer_names)
    assert report.seen.tokens_of_row == 5
    assert "tokens/s" in report.summary()
    # The parameters of a device and their gradients are a part of its peak.
    held = [0.0, 0.0]
    for device, count in enumerate(pipe.partition.parameters):
        held[device] += 2 * 4 * count
    assert all(a > b for a, b in zip(report.seen.held_bytes, held, strict=True))


class Residual(nn.Module):
    """Its input goes past all stages but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h).relu()
        return h + x


def test_values_that_pass_stages_are_there_when_layers_are_timed() -> None:
    """The profile of such a model was a KeyError."""
    x = torch.randn(6, 4)
    with Pipeline(
        Residual(), devices="cpu:3", microbatches=3, loss_fn=mse_loss, sample=x[:2]
    ) as pipe:
        assert len(pipe.profile(x, target=x, steps=1).seen.layer_ns) == 3


class Joins(nn.Linear):
    """Takes two arguments."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x) if y is None else super().forward(x) + y


def test_layers_are_timed_behind_a_first_one_of_several_arguments() -> None:
    """The profile told of stages alone, and suggested no other cut."""
    x = torch.randn(6, 4)
    with pipeline(Joins(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) as pipe:
        assert len(pipe.profile(x, 2 * x, target=x, steps=1).seen.layer_ns) == 3
        assert not pipe.profile(x, y=x, target=x, steps=1).seen.layer_ns


def test_the_operations_of_a_step_are_counted() -> None:
    x = torch.randn(6, 4)
    # F, and B for inputs but of the first layer and for weights: each two operations a weight.
    expected = 2 * 6 * 4 * 4 * (2 + 3)
    for recompute in ("none", "stage"):
        with pipeline(nn.Linear(4, 4), nn.Linear(4, 4), recompute=recompute) as pipe:
            report = pipe.profile(x, target=x, steps=1)
        assert report.seen.flops == expected
        assert report.flops_per_ns == pytest.approx(expected / report.seen.step_ns)
        assert "TFLOP/s" in report.summary()


def test_replicas_and_halves_of_backwards_are_profiled() -> None:
    x = torch.randn(8, 4)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for more in ({"schedule": "zb_h1"}, {"replicas": 2, "devices": "cpu:4", "microbatches": 8}):
        with pipeline(*layers, **more) as pipe:
            report = pipe.profile(x, target=x, steps=1)
        total = report.causes.work_ns + sum(cause.worth_ns for cause in report.causes.found)
        assert total == pytest.approx(report.seen.timeline.makespan_ns)
        assert "Stages" in str(report)


def test_recompute_stays_where_it_is() -> None:
    x = torch.randn(6, 4)
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4), recompute="stage") as pipe:
        report = pipe.profile(x, target=x, steps=1)
    assert "R ms" in str(report)
    assert {change.family for change in report.changes} <= {"cut"}


def test_gpus_are_profiled_by_their_events() -> None:
    def profiled(capture: bool) -> Report:
        x = torch.randn(6, 4)
        layers = nn.Linear(4, 4), nn.Linear(4, 4)
        with pipeline(*layers, devices="cuda", capture=capture) as pipe:
            return pipe.profile(x, target=x, steps=1)

    def tells_of_capture(report: Report) -> bool:
        (late,) = (of for of in report.causes.found if of.name == "late starts")
        return "capture=True" in late.remedy

    with host_gpus(2):
        report, captured = profiled(capture=False), profiled(capture=True)
    assert report.seen.num_cores is None
    assert (report.seen.layer_ns, report.seen.action_ns) == ((), {})
    assert len(report.tables()) == 5
    assert report.seen.hidden_copies is not None
    assert (tells_of_capture(report), tells_of_capture(captured)) == (True, False)


def test_lines_that_wait_for_a_gpu_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's debug mode, whose warning a layer gives here in torch's place."""
    modes: list[int | str] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another", stacklevel=1)

    (line,) = host_waits_of(step)
    assert line.startswith("test_pipeline.py:")
    assert modes == ["warn", 0]


def waited_s() -> float:
    """The time that this process's threads have waited for a core."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread of an earlier test may end meanwhile.
        with suppress(OSError):
            total_ns += int((task / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def test_workers_that_sleep_on_few_cores_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # So long that other programs, which take the cores meanwhile, hardly delay what comes next.
    monkeypatch.setitem(globals(), "SLEEP_S", 4 * SLEEP_S)
    x = torch.randn(2, 4)
    layers = [Sleeps(4, 4) for _ in range(4)]
    with pipeline(*layers, devices="cpu:4", microbatches=2) as pipe:
        before = waited_s()
        report = pipe.profile(x, target=x, steps=1)
        waited = waited_s() - before
    # No wait is counted where Linux does not count them, or no other program runs.
    assert report.seen.core_share >= 1 - waited / (8 * SLEEP_S)
    alone = causes_of(replace(report.seen, core_share=1.0))
    assert alone.found[0].name == "warm-up and cool-down"


@pytest.mark.parametrize(
    ("cores_ms", "waited_ms", "share"),
    [
        (1, 0.1, 0.999),  # sleeps
        (30, 70, 0.3),  # in its actions
        (100, 100, 0.5),  # between them
        (5, 0, 1.0),
        (5, -1, 1.0),  # a thread has ended, and its waits with it
    ],
)
def test_the_part_of_time_on_a_core(cores_ms: float, waited_ms: float, share: float) -> None:
    action = Span(Action(Kind.F, 0, 0), 0, 100e6)
    costs = pykern.plan.Costs(1, 1)
    ran = TimedStep(
        100, int(cores_ms * 1e6), int(waited_ms * 1e6), Timeline([[action]]), Timeline([]), costs
    )
    assert core_share([ran]) == pytest.approx(share, abs=1e-3)


class Spins(nn.Linear):
    """A layer that keeps a core busy, and lets other threads take the interpreter lock."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            hashlib.sha256(BYTES)
        return super().forward(x)


def test_workers_that_spin_on_one_core_share_it() -> None:
    """Sharing was told only of a process that used three quarters of its cores, and never named."""
    x = torch.randn(6, 4)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pipeline(*(Spins(4, 4) for _ in range(3)), devices="cpu:3") as pipe:
            report = pipe.profile(x, target=x, steps=2)
    finally:
        os.sched_setaffinity(0, cores)
    assert report.seen.num_cores == 1
    # One worker of three has the core at a time.
    assert report.seen.core_share < 0.75
    (shared,) = (cause for cause in report.causes.found if cause.name == "shared cores")
    assert shared.worth_ns > 0.25 * report.seen.quiet.makespan_ns


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles knew the affinity alone, and saw a core for each worker in a container."""
    monkeypatch.setattr(cgroup, "limits", lambda: cgroup.Limits(cores=1.5))
    x = torch.randn(6, 4)
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4)) as pipe:
        assert pipe.profile(x, target=x, steps=1).seen.num_cores == 1


def test_only_steps_that_leave_weights_alone_are_profiled() -> None:
    x = torch.randn(6, 4)
    with (
        pykern.AsyncPipeline(
            [nn.Linear(4, 4), nn.Linear(4, 4)],
            devices="cpu:2",
            microbatches=3,
            optimizer=torch.optim.SGD,
            loss_fn=mse_loss,
        ) as pipe,
        pytest.raises(ValueError, match="AsyncPipeline updates weights within its steps"),
    ):
        pipe.profile(x, target=x)
    with pipeline(nn.Linear(4, 4), nn.Linear(4, 4)) as pipe, pytest.raises(ValueError, match="ste"):
        pipe.profile(x, target=x, steps=0)

"""Sections of the GPU session and the faults that they must notice. Run by test_device_oracle.py.

Stand-ins play all that sections need beside torch and the driver: twins for Triton's kernels,
torch's operations for the kernel of `green`, the driver's count of launches for CUPTI.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from bench.contenders import Task
from bench.driver_log import steps
from bench.gpu import (
    capture_copy,
    driver_log,
    graph_step,
    green,
    in_a_row,
    issue_rate,
    levels,
    no_waits,
    overlap,
    pools,
    predicted,
    profiler,
    raw_launch,
    split_capture,
    stitch,
    tight,
    tuned,
)
from bench.gpu.gpt_work import GptWork
from bench.gpu.groups import split
from bench.gpu.tools import DEVICE, own_stream
from bench.gpu.variants import CAPTURES
from pykern.tuning import measure, overheads, trial
from tests.device_oracle.bindings import Bindings
from tests.device_oracle.oracle import counts, gpus, load
from tests.device_oracle.stand_ins import Cupti, Cupy
from tests.fake_cuda.fake import FakeCuda

CYCLES_PER_NS = 2


def and_wait(read: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads values, with the host's wait, which orders all that is issued later."""

    def waiting(*tensors: torch.Tensor) -> Any:
        found = read(*tensors)
        torch.cuda.synchronize()
        return found

    return waiting


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with gpus(1) as fake:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", Bindings(fake))
        monkeypatch.setitem(sys.modules, "cupy", Cupy(fake))
        monkeypatch.setattr(driver_log, "DRIVER", fake.library._name)
        monkeypatch.setattr(profiler, "profile", partial(Cupti, fake))
        monkeypatch.setattr(torch, "equal", and_wait(torch.equal))
        monkeypatch.setattr(torch.Tensor, "item", and_wait(torch.Tensor.item))
        yield fake
        torch.autograd.set_multithreading_enabled(True)


@pytest.fixture
def clock(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that takes the driver's own time, and the time between two events of it."""
    cu: Any = Bindings(fake)

    def sleep(cycles: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream or fake.default_stream(0)
        fake.kernel(stream, duration_ns=cycles / CYCLES_PER_NS)

    def elapsed_ms(issue: Callable[[], Any], streams: Sequence[Any]) -> float:
        here = fake.stream(0)
        # The host's time becomes the stream's.
        fake.synchronize()
        fake.kernel(here, duration_ns=0)
        start, end = (cu.cuEventCreate(0)[1] for _ in range(2))
        cu.cuEventRecord(start, here)
        for stream in streams:
            cu.cuStreamWaitEvent(stream.cuda_stream, start, 0)
        issue()
        for stream in streams:
            fake.order(stream.cuda_stream, here)
        cu.cuEventRecord(end, here)
        fake.run_all()
        took = torch.zeros(1)
        cu.cuEventElapsedTime(took.data_ptr(), start, end)
        return took.item()

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(overlap, "elapsed_ms", elapsed_ms)


@pytest.mark.parametrize(
    "name",
    [
        *("raw_launch", "capture_copy", "pools", "split_capture", "stitch", "graph_step"),
        *("driver_costs", "issue_rate", "overlap", "levels", "profiler", "driver_log"),
    ],
)
def test_a_planted_fault_is_noticed(
    clock: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(issue_rate, "STEPS", 5)
    monkeypatch.setattr(levels, "ROUNDS", 1)
    assert importlib.import_module(f"bench.gpu.{name}").control()


@pytest.mark.parametrize(
    "name", ["capture_copy", "pools", "split_capture", "stitch", "issue_rate", "driver_costs"]
)
def test_a_section_runs_whole(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(issue_rate, "STEPS", 5)
    sections[name] = importlib.import_module(f"bench.gpu.{name}").run(tmp_path)


def test_without_the_fault_they_are_right() -> None:
    assert raw_launch.plain(own_stream())["raw_equals_replay"] == [True] * 5
    assert capture_copy.measure(copies=True)["right"]
    assert all(pools.slots([torch.cuda.graph_pool_handle() for _ in range(4)])["right"])
    assert stitch.measure(copies=True)["equal"]
    stage, x, upstream = split_capture.task()
    for w_elsewhere in (False, True):
        found = split_capture.split(stage, x, upstream, w_elsewhere=w_elsewhere)
        assert found["input_gradient_equal"]
        assert all(found["weight_gradients_equal"])
    found = split_capture.accumulated(stage, x, upstream)
    assert found["grad_stays_in_place"]
    assert all(found["two_launches_add_up"])


def test_streams_that_spin_take_the_simulated_time(clock: None, sections: dict[str, Any]) -> None:
    found = overlap.figures([own_stream() for _ in range(overlap.NUM_STREAMS)])
    sections["overlap"] = {"1 process": found}
    assert found["at_once"] == pytest.approx(overlap.NUM_STREAMS)
    for ratio in found["measured_by_simulated"].values():
        assert ratio == pytest.approx(1)


def test_groups_of_multiprocessors_spin_at_once(clock: None) -> None:
    """Without events, since the fake refuses torch's on streams of groups."""
    streams = [group.stream() for group in split(overlap.NUM_STREAMS, 32)]
    assert overlap.spins_ms(streams) == pytest.approx(overlap.spins_ms(streams[:1]))


def test_replayed_steps_are_compared_with_a_graph_of_the_plain_model(
    sections: dict[str, Any],
) -> None:
    """Layers whose operations are torch's take the place of the GPT, whose kernels are Triton's."""
    x, y = torch.randn(2, 2 * graph_step.NUM_MICROBATCHES, 8, device=DEVICE)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    found = graph_step.measure(Task(layers, x, y, graph_step.NUM_MICROBATCHES, mse_loss), rounds=2)
    sections["graph_step"] = found
    assert found["errors"] == {}
    assert found["ran"] == [
        "graphed", "plain loop", "pykern eager", "pykern graph", "pykern step", "pykern threads"
    ]  # fmt: skip


@contextmanager
def no_wait() -> Iterator[None]:
    """In the place of torch's check, which asks CUDA."""
    before = counts().host_waits
    yield
    if counts().host_waits > before:
        raise RuntimeError("called a synchronizing CUDA operation")


def test_steps_that_wait_for_the_gpu_are_noticed(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], tmp_path: Path
) -> None:
    monkeypatch.setattr(no_waits, "refused", no_wait)
    assert no_waits.control()
    sections["no_waits"] = found = no_waits.run(tmp_path)
    assert found["streams"]["step"] == {"steps": no_waits.NUM_STEPS}


def test_pipelines_that_keep_memory_are_noticed(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], tmp_path: Path
) -> None:
    monkeypatch.setattr(in_a_row, "NUM_PIPELINES", 4)
    monkeypatch.setattr(in_a_row, "CAPTURES", {"graph": True})
    monkeypatch.setattr(in_a_row, "WIDTH", 512)
    assert in_a_row.control()
    sections["in_a_row"] = found = in_a_row.run(tmp_path)
    assert list(found) == ["graph"]


def test_captures_come_where_little_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], tmp_path: Path
) -> None:
    for name, size in {"WIDTH": 64, "ROWS": 2, "LEFT_BYTES": 2**22}.items():
        monkeypatch.setattr(tight, name, size)
    load().oracle_set_limit(2**26)
    sections["tight"] = found = tight.run(tmp_path)
    assert found["taken_bytes"] == int(tight.TAKEN * 2**26)
    assert found["cached_bytes"] > 2**22
    assert len(found["losses"]) == 2
    assert tight.control()


def test_steps_are_predicted_from_those_of_another_schedule(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr(predicted, "STEPS", 1)
    told_by = {
        name: (plan, dict(list(plans.items())[1:2]))
        for name, (plan, plans) in predicted.PREDICTED.items()
    }
    monkeypatch.setattr(predicted, "PREDICTED", told_by)
    figures = predicted.measure(GptWork(blocks=2, width=64, context=8), True)
    sections["predicted"] = {"graph": figures}
    assert list(figures) == ["1f1b, M=4", "zb_h1, M=8"]
    for found in figures.values():
        assert found["traced_ms"] == pytest.approx(found["predicted_ms"], rel=0.01)
        assert found["step_ms"] > 0
    assert predicted.control()


def test_the_choice_for_a_gpt_is_told_with_its_bytes(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(overheads, "_ROUNDS", 2)
    monkeypatch.setattr(trial, "FEWEST", 2)
    monkeypatch.setattr(trial, "MOST", 2)
    work = GptWork(blocks=1, width=64, context=8)
    choice = tuned.tuned(work, 4)
    found = tuned.measure(choice, work, 4)
    sections["tuned"] = {"all memory": found}
    assert len(found["run"]) == 6
    assert found["peak_bytes"] == pytest.approx(max(choice.best.peak_bytes), rel=0.2)


# The fake's answers to an event of another context, and to a second split of a GPU.
REFUSED = "cuEventRecord: the event is of another context than the stream"
OVERLAP = "are in another green context"


def test_groups_of_multiprocessors_are_told_apart(
    fake: FakeCuda, sections: dict[str, Any], tmp_path: Path
) -> None:
    sections["green"] = figures = green.run(tmp_path)
    for sizes, found in zip(([64] * 2, [32] * 4), figures.values(), strict=True):
        assert found["multiprocessors"] == found["seen_eager"] == sizes
        assert found["seen_in_graph_launched_elsewhere"] == sizes
        assert found["disjoint_eager"]
        assert all(found["graph_keeps_group"])
        for answers in found["event_of_primary_context"]:
            assert answers == {"record": "error 400", "wait": "error 0"}
    told = fake.forgive()
    assert told.count(REFUSED) == 6
    assert all(OVERLAP in text for text in told if text != REFUSED)


def test_groups_that_are_the_same_are_noticed(fake: FakeCuda) -> None:
    assert green.control()
    fake.forgive()


def test_a_graph_that_leaves_its_group_is_noticed(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy(fake, keeps_group=False))
    assert green.seen_by(split(2, 64))["graph_keeps_group"] == [False, False]
    fake.forgive()


def test_levels_keep_less_the_more_they_recompute(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], tmp_path: Path
) -> None:
    for name, size in {"BLOCKS": 2, "WIDTH": 64, "HEADS": 4, "TOKENS": 32, "ROUNDS": 1}.items():
        monkeypatch.setattr(levels, name, size)
    sections["levels"] = figures = levels.run(tmp_path)
    kept = {level: found["activation_bytes"] for level, found in figures.items()}
    assert kept["none"] > kept["ops"] > kept["ops+stash"] > kept["stage"] > kept["layer"] > 0
    assert kept["none"] > 2 * kept["stage"]
    assert all(found["predicted_ms"] > 0 for found in figures.values())


def test_launches_are_among_the_events_of_a_profile(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    sections["profiler"] = figures = profiler.run(tmp_path)
    assert figures["events"]["cuGraphLaunch"] == figures["launches"] == profiler.NUM_LAUNCHES
    assert (tmp_path / "profiler.trace.json").stat().st_size > 0


def test_logs_of_driver_calls_replay_and_have_the_calls_of_the_kept_ones(
    sections: dict[str, Any], tmp_path: Path
) -> None:
    sections["driver_log"] = figures = driver_log.run(tmp_path)
    assert list(figures) == list(CAPTURES)
    for name, found in figures.items():
        assert (tmp_path / f"driver_log.{name}.log").stat().st_size == found["bytes"]
        assert found["differences"] == found["violations"] == []
        assert found["calls_of_step_as_on_the_fake"]
    assert figures["step"]["calls_of_step"]["cuGraphLaunch"] == 1


RENEW = "Once the other order is known to be right: python -m tests.driver_log.renew"


@pytest.mark.parametrize("name", CAPTURES)
def test_a_step_makes_the_calls_of_the_kept_log(fake: FakeCuda, name: str) -> None:
    """Each function with its objects, in the order in which the calling thread issues them."""
    kept = (driver_log.KEPT / f"{name}.log").read_text()
    now = steps.recorded(fake.library._name, DEVICE, CAPTURES[name])
    assert steps.calls_of_step(now) == steps.calls_of_step(kept), RENEW


def test_a_mode_that_watches_changes_no_call(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = (driver_log.KEPT / "eager.log").read_text()
    monkeypatch.setattr(steps, "on_streams", lambda _: nullcontext())
    now = steps.recorded(fake.library._name, DEVICE, capture=False)
    assert "work" not in now
    assert steps.calls_of_step(now) == steps.calls_of_step(kept)

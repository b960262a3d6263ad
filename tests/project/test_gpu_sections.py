"""The GPU session's measurements of pipelines are right, on GPUs that are the host.

Whether the GPU's rules are kept is for the tests of pipelines; here, several share a host.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pykern
from bench.gpu import (
    action_cpu,
    copy_overlap,
    each_once,
    each_operation,
    kernels,
    makespan,
    peers,
    sanitizer,
    side_by_side,
    traffic,
)
from bench.gpu.spin import Spin, Times
from bench.gpu.variants import FOURS
from pykern import schedules
from pykern.plan import Action, Costs, Kind, Placement, Span, Timeline, simulate
from tests.diagonal import nightly
from tests.fake_cuda.host_gpus import HostGpus, unchecked_gpus

HOST = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="sections would use the GPU")
pytestmark = no_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One, on which every action takes as long as any other: far longer than the host."""
    monkeypatch.setattr(HostGpus, "duration_ns", 1e9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with unchecked_gpus(1):
        yield
    torch.set_num_threads(threads)
    torch.autograd.set_multithreading_enabled(True)


def no_sleep(us: float) -> None:
    """The driver's clock is told of actions as a whole."""


COSTS = Costs(forward_ns=1e9, backward_ns=1e9)


@pytest.mark.parametrize(
    "name",
    [
        "interleaved",
        "hanayo W=1",
        *map(nightly, sorted(makespan.PLANS.keys() - {"interleaved", "hanayo W=1"})),
    ],
)
def test_a_measured_makespan_is_the_simulated_one(gpu: None, name: str) -> None:
    x = torch.zeros(makespan.NUM_MICROBATCHES, 4)
    plan = makespan.PLANS[name]
    devices = list(FOURS.values())[-1]
    figures = makespan.against(plan, devices, no_sleep, x, capture=False)
    simulated_ms = simulate(plan, COSTS).makespan_ns / 1e6
    assert figures["traced_ms"] == pytest.approx(simulated_ms, rel=0.01)


def test_stages_that_are_slower_than_their_costs_are_noticed(gpu: None) -> None:
    x = torch.zeros(makespan.NUM_MICROBATCHES, 4)
    half = Costs(forward_ns=0.5e9, backward_ns=0.5e9)
    assert makespan.are_slow(no_sleep, half, x)
    assert not makespan.are_slow(no_sleep, COSTS, x)


def test_a_contender_with_wrong_gradients_is_noticed() -> None:
    assert side_by_side.notices_wrong_gradients(HOST)


@pytest.mark.slow
def test_makespans_are_measured_of_each_variant(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(makespan, "PLANS", {"1f1b": makespan.PLANS["1f1b"]})
    figures = makespan.measure(no_sleep, COSTS, torch.zeros(makespan.NUM_MICROBATCHES, 4))
    simulated_ms = figures["1f1b"]["simulated_ms"]
    for of_devices in (figures["1f1b"][name] for name in FOURS):
        assert list(of_devices) == ["eager", "graph", "step"]
        assert of_devices["graph"]["traced_ms"] == pytest.approx(simulated_ms, rel=0.01)
        assert of_devices["step"]["step_ms"] > 0


def test_what_copies_overlap_with_is_measured(gpu: None) -> None:
    figures = copy_overlap.measure(no_sleep, torch.zeros(copy_overlap.NUM_MICROBATCHES, 8))
    assert figures["message_bytes"] == 32
    for devices in ("streams", "groups"):
        for variant in ("eager", "graph"):
            found = figures[devices][variant]
            assert found["copies"] == 2 * 3 * copy_overlap.NUM_MICROBATCHES
            assert found["makespan_ms"] == pytest.approx(11 * 2 * 1e3, rel=0.01)
            assert 0 <= found["share_while_both_compute"] <= 1


def test_shares_of_copies_by_hand() -> None:
    def row(*times: tuple[float, float], kind: Kind, stage: int) -> list[Span]:
        return [Span(Action(kind, stage, m), *time) for m, time in enumerate(times)]

    actions = Timeline(
        [
            row((0, 10), (20, 30), kind=Kind.F, stage=0),
            row((12, 26), kind=Kind.F, stage=1),
        ]
    )
    # Sender and receiver: nobody computes for 2, the receiver for 8, both for 4.
    copies = Timeline([row((10, 24), kind=Kind.COPY_F, stage=0)])
    figures = copy_overlap.figures(Placement.linear(2), actions, copies)
    assert figures["copy_ms"] == pytest.approx(14 / 1e6)
    assert figures["share_while_sender_or_receiver_computes"] == pytest.approx(12 / 14)
    assert figures["share_while_both_compute"] == pytest.approx(4 / 14)


def test_cpu_time_of_an_action_is_measured(gpu: None) -> None:
    figures = action_cpu.measure(HOST, rounds=2)
    assert figures["actions"] == 2 * 4 * 32
    assert figures["eager"]["us_per_action"] > figures["plain loop"]["us_per_action"] > 0


def test_the_functions_of_a_called_step_are_told(gpu: None) -> None:
    assert "dispatch" in action_cpu.profiled(HOST, num_steps=1)


@pytest.mark.slow
def test_a_step_of_spins_is_drawn(gpu: None, tmp_path: Path) -> None:
    x = torch.zeros(makespan.NUM_MICROBATCHES, 4)
    makespan.draw(makespan.PLANS["1f1b"], no_sleep, COSTS, x, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert all(name in text for name in ("simulated", "measured", "copies"))


def test_every_way_takes_its_steps(gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    each_once.steps(HOST, {"eager": False})
    assert capsys.readouterr().out.splitlines() == ["ran streams, eager", "ran groups, eager"]


def test_a_way_that_fails_leaves_the_others(gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    wrong: Any = {"no way": "no way", "eager": False}
    each_once.steps(HOST, wrong)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("failed streams, no way: capture must be ")
    assert [line.partition(":")[0] for line in others] == [
        "ran streams, eager",
        "failed groups, no way",
        "ran groups, eager",
    ]


def test_peers_are_compared_and_timed(gpu: None) -> None:
    figures = peers.measure("tiny", peers.tiny(HOST), rounds=2)
    wanted = ["plain loop", "pykern eager", "pykern graph"]
    if "step" not in figures["errors"]:
        wanted.append("pykern step")
    if torch.__version__ >= "2.12":
        wanted.append("torch runtime, 1 process")
    older = {"torchgpipe": "torchgpipe", "fairscale": "fairscale Pipe"}
    for name, contender in older.items():
        if importlib.util.find_spec(name):
            wanted.append(contender)
        else:
            assert figures["errors"][name].startswith("absent: ")
    assert [record["contender"] for record in figures["records"]] == wanted


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 12 errors", 12),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 2),
        ("Device not supported", None),
    ],
)
def test_the_sanitizers_count_is_read(output: str, errors: int | None) -> None:
    assert sanitizer.errors_in(f"========= COMPUTE-SANITIZER\n{output}\n") == errors


# In the place of compute-sanitizer, which needs a GPU: finds the planted faults, if told to.
STAND_IN = """\
#!/bin/sh
case "$*" in
  *bench.gpu.planted*) errors=$FOUND ;;
  *) errors=0; echo "$STEPS" ;;
esac
case "$2" in
  memcheck) echo "========= ERROR SUMMARY: $errors errors" ;;
  racecheck) echo "========= RACECHECK SUMMARY: 3 hazards displayed ($errors errors, 0 warnings)" ;;
esac
"""


def test_the_sanitizer_is_run_and_must_find_what_is_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for found, notices in (("2", True), ("0", False)):
        monkeypatch.setenv("FOUND", found)
        assert sanitizer.control() == notices
    monkeypatch.setenv("STEPS", "ran streams, eager")
    of_each = {"errors": 0, "ran": ["streams, eager"], "failed": []}
    assert sanitizer.run(tmp_path) == {"memcheck": of_each, "racecheck": of_each}
    monkeypatch.setenv("STEPS", "failed streams, graph: it is held")
    with pytest.raises(RuntimeError, match="it is held"):
        sanitizer.run(tmp_path)


# In the place of ncu: 100 bytes read and 50 written by each kernel, of which a copy is one more.
NCU = """\
#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2
kernel() { echo "\\"0\\",\\"$1\\",\\"1,00\\",\\"50\\",\\"2000000\\""; }
{
  echo "==PROF== Connected"
  echo '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"'
  echo '"","","byte","byte","ns"'
  kernel norm; kernel norm_backward; kernel "at::cuda::spin_kernel(long)"
  kernel norm; kernel norm_backward; [ -z "$COPIES" ] || kernel copy
  kernel "at::cuda::spin_kernel(long)"
} > "$log"
echo "operation 150 rms_norm"; echo "operation 150 rms_norm and a copy"
"""


def test_bytes_are_counted_and_a_copy_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ncu"
    program.write_text(NCU)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("COPIES", "")
    assert not traffic.control()
    monkeypatch.setenv("COPIES", "1")
    assert traffic.control()
    assert traffic.run(tmp_path)["rms_norm and a copy"] == {
        "kernels": 3,
        "bytes": 450,
        "by_ideal": 3.0,
        "ms": 6.0,
    }


def test_each_operation_is_there_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each_operation, "DEVICE", HOST)
    for name, size in (("TOKENS", 8), ("WIDTH", 256), ("HIDDEN", 32)):
        monkeypatch.setattr(kernels, name, size)
    found = [name for name, num_bytes, step in each_operation.steps(planted=False) if step()]
    assert {"rms_norm", "swiglu", "rope"} < set(found)
    (alone, num_bytes, _), (copied, same, step) = each_operation.steps(planted=True)
    assert (copied, same) == (f"{alone} and a copy", num_bytes)
    assert len(step()) == 2


def test_a_spinning_stage_sleeps_in_each_part_of_backward() -> None:
    slept: list[float] = []
    times = Times(forward_us=1, input_us=20, weight_us=300)
    stages = [Spin(slept.append, times) for _ in range(2)]
    with pykern.Pipeline(
        stages, devices="cpu:2", schedule=schedules.zb_h1(2, 1), loss_fn=torch.sum
    ) as pipe:
        pipe.step(torch.zeros(2, 3))
        rows = [[action.kind for action in row] for row in pipe.plan.rows]
    assert rows == [[Kind.F, Kind.I, Kind.W]] * 2
    # F, F, I of stage 1, then its W beside the backward of stage 0, which is W's as a whole: there,
    # x needs no gradient.
    assert slept[:3] == [1, 1, 20]
    assert sorted(slept[3:]) == [20, 300, 300]

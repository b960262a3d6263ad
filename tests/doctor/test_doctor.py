"""The doctor names planted problems with their fixes, and says in its exit code what stops."""

import io
import os
from math import inf
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pykern import _C
from pykern.cgroup import Limits, limits
from pykern.cli import app
from pykern.doctor import Diagnosis, Fact, examine
from pykern.doctor.cores import cores, of_torch_threads
from pykern.doctor.facts import a_step
from pykern.doctor.gpus import gpus, of_bytes
from pykern.doctor.limits import of_compiler, of_memory, of_settings, of_threads
from pykern.doctor.versions import of_core, of_torch, of_triton
from pykern.pipeline.pipeline import Pipeline
from tests.fake_cuda.fake import FakeCuda

GIB = 2**30


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fake driver of another test stays in the process.
    found = [Fact("CUDA driver", "no CUDA driver; pipelines run on CPU workers")]
    monkeypatch.setattr("pykern.doctor.facts.gpus", lambda _: found)


@pytest.mark.usefixtures("_no_driver")
def test_all_facts_are_there_and_a_step_runs() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        result = CliRunner().invoke(app, ["doctor"])
    finally:
        torch.set_num_threads(threads)
    lines = result.stdout.splitlines()
    names = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert names[:6] == ["Python", "torch", "Triton", "numpy", "pykern", "CUDA driver"]
    assert names[-1] == "a step"
    assert {"cores", "torch threads", "thread limit", "free memory", "compiler"} <= set(names)
    assert f"pykern: 0.1.0, built by {_C.compiler}" in result.stdout
    assert "a step: two CPU workers give the plain model's bits" in lines
    # Another process may leave too little memory.
    assert result.exit_code == any(line.startswith("  stops: ") for line in lines)


@pytest.mark.usefixtures("_no_driver")
def test_a_pipeline_that_fails_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("the system refused a thread")

    monkeypatch.setattr(Pipeline, "step", refused)
    assert a_step().verdict == "stops"
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "a step: the system refused a thread\n  stops: A pipeline of two" in result.stdout


PROBLEMS = [
    (of_torch(None), "stops", "pip install 'torch>=2.11'"),
    (of_torch("2.9.1+cpu"), "stops", "torch must be 2.11 or newer"),
    (of_core("GCC 12", optimised=False, nvtx=True), "slows", "built without optimisation"),
    (of_core("GCC 12", optimised=True, nvtx=False), "slows", "install nvidia-nvtx"),
    (of_triton(None, has_gpus=True), "slows", "pip install 'pykern-runtime[triton]'"),
    (of_bytes(["0 to 1", "1 to 0"]), "slows", "disable the IOMMU or ACS"),
    (of_torch_threads(8, 2), "slows", "torch.set_num_threads(2)"),
    (of_torch_threads(8, 1), "slows", "with the workers for 1 core: call"),
    (of_threads(Limits(free_threads=10), inf), "stops", "pids.max"),
    (of_threads(Limits(), 20), "stops", "ulimit -u"),
    (of_memory(Limits(free_bytes=GIB / 2), inf, inf), "stops", "need 1 GiB"),
    (of_memory(Limits(), inf, GIB / 4), "stops", "ulimit -v"),
    (of_compiler({"CXX": "/absent/c++ -O2"}), "slows", "/absent/c++ -O2 is not there"),
    (*of_settings({"CUDA_LAUNCH_BLOCKING": "1", "HOME": "1"}), "slows", "unset it"),
]


@pytest.mark.parametrize(("fact", "verdict", "fix"), PROBLEMS, ids=lambda of: str(of)[:20])
def test_a_planted_problem_has_its_fix(fact: Fact, verdict: str, fix: str) -> None:
    assert fact.verdict == verdict
    assert fix in fact.problem
    # One sentence.
    assert fact.problem.endswith(".")
    assert ". " not in fact.problem


def test_a_terminal_gets_a_table() -> None:
    out = io.StringIO()
    report = Diagnosis([of_torch(None), of_torch_threads(1, 2)])
    Console(file=out, width=100).print(report)
    first, fix, second = [line.split() for line in out.getvalue().splitlines()[1:]]
    assert (first[0], first[-1]) == ("torch", "stops")
    assert fix[0] == "torch"
    assert second[-1] == "ok"


def test_all_is_well_without_a_problem() -> None:
    well = [
        of_triton(None, has_gpus=False),
        of_triton("3.5", has_gpus=True),
        of_bytes([]),
        of_torch("2.11.0"),
        of_torch("2.15.0a0+git1"),
        of_core("GCC 12", optimised=True, nvtx=True),
        of_torch_threads(2, 2),
        of_threads(Limits(), inf),
        of_memory(Limits(), 4 * GIB, inf),
    ]
    assert {fact.verdict for fact in well} == {"ok"}
    assert [*of_settings({"CUDA_LAUNCH_BLOCKING": "0"})] == []


@pytest.mark.usefixtures("_two_cores")
@pytest.mark.parametrize(
    ("limit", "fix"), [(inf, ""), (1.5, "share one core"), (0.5, "share one core")]
)
def test_cores_are_those_that_may_be_used(limit: float, fix: str) -> None:
    of_cores, _ = cores(Limits(cores=limit), 1)
    assert of_cores.value.startswith("2 usable" if limit == inf else "1 usable")
    assert fix in of_cores.problem
    assert bool(fix) == bool(of_cores.problem)


FOUND = {
    "second version": (
        "0::/box/job\n",
        {
            "box/cpu.max": "150000 100000",
            "box/job/cpu.max": "max 100000",
            "box/job/memory.max": "4096",
            "box/job/memory.current": "1024",
            "box/pids.max": "100",
            "box/pids.current": "10",
        },
    ),
    "first version": (
        "3:pids:/a\n2:memory:/a/b\n1:cpu:/\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/a/memory.limit_in_bytes": "4096",
            "memory/a/memory.usage_in_bytes": "1024",
            "pids/a/pids.max": "100",
            "pids/a/pids.current": "10",
            "pids/pids.max": "max",
        },
    ),
}


@pytest.mark.parametrize("groups", FOUND)
def test_limits_of_control_groups_are_the_tightest(groups: str, tmp_path: Path) -> None:
    own, files = FOUND[groups]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert limits(tmp_path) == Limits(cores=1.5, free_bytes=3072, free_threads=90)
    assert limits(tmp_path / "absent") == Limits()


def test_the_driver_its_devices_and_their_peers_are_told(fake_cuda: FakeCuda) -> None:
    driver, *devices, peers = gpus("13.0")
    assert str(Diagnosis([driver])) == "CUDA driver: CUDA 13.0, 2 devices"
    assert [(fact.name, fact.value) for fact in devices] == [
        (f"cuda:{n}", f"fake device {n}, 132 multiprocessors") for n in range(2)
    ]
    assert (peers.value, peers.problem) == ("1 of 1 pairs of devices", "")
    fake_cuda.set_peer(0, 1, False)
    *_, peers = gpus("13.0")
    assert peers.verdict == "slows"
    assert "Copies between devices 0-1 go through host memory" in peers.problem


@pytest.mark.parametrize(
    ("torch_cuda", "fix"), [(None, "built without CUDA"), ("13.1", "update the driver")]
)
def test_a_torch_that_cannot_use_the_driver_stops(
    fake_cuda: FakeCuda, torch_cuda: str | None, fix: str
) -> None:
    driver, *_ = gpus(torch_cuda)
    assert driver.verdict == "stops"
    assert fix in driver.problem


def test_a_driver_that_fails_stops(fake_cuda: FakeCuda) -> None:
    fake_cuda.fail("cuDeviceGetCount", 1, 999)
    (driver,) = gpus("13.0")
    assert driver.verdict == "stops"
    assert driver.value.startswith("cuDeviceGetCount")


def test_a_missing_torch_is_told_before_anything_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pykern.doctor.versions.installed", lambda _: None)
    report = examine()
    assert report.stops
    assert "a step" not in {fact.name for fact in report.facts}

"""The parts of the GPU session that can be checked without a GPU: its frame, and that its sections
import."""

import importlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu_session
from bench.gpu import frame, one, overlap
from bench.gpu import tests as gpu_tests
from pykern.plan import Action
from pykern.schedules import gpipe, hanayo, interleaved, one_f_one_b

ROOT = Path(__file__).parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@no_gpu
def test_a_dry_run_describes_every_section_and_starts_none(python, tmp_path):
    out = tmp_path / "results"
    done = python("bench/gpu_session.py", *frame.RUNS, "--out", out, "--dry-run")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    for name in frame.SECTIONS:
        mine = [line for line in lines if line.split()[0] == name]
        assert len(mine) == 2, name
        assert mine[1].split("lacks ")[1].startswith("a CUDA device")
    faults = [line.strip() for line in lines if line.strip().startswith("fault: ")]
    assert len(faults) == len(frame.SECTIONS)
    assert "fault: " not in faults
    assert not out.exists()


def test_an_unknown_section_is_named(python, tmp_path):
    done = python("bench/gpu_session.py", "green", "gren", "--out", tmp_path)
    assert done.returncode == 1
    assert "what must be runs or sections, got ['gren']. " in done.stdout


@pytest.mark.parametrize(
    "name", ["build", "tests", "first_hour", "copy_overlap", "action_cpu", "kernels"]
)
def test_a_planted_fault_is_noticed(name):
    """Sections that judge without a GPU; for some others, see test_gpu_sections.py."""
    assert importlib.import_module(f"bench.gpu.{name}").control()


def test_tests_that_are_all_skipped_have_shown_nothing(tmp_path):
    """As those that need a GPU are without one."""
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip()\n")
    with pytest.raises(RuntimeError, match="1 skipped"):
        gpu_tests.passed(str(skipped), tmp_path)


def test_sections_that_leave_time_give_it_to_later_ones(tmp_path, monkeypatch):
    allowed = []

    def run_section(name, folder, left_s, stretch):
        allowed.append(round(frame.SECTIONS[name] * stretch))
        return {"outcome": "ok", "figures": {}}

    monkeypatch.setattr(frame, "run_section", run_section)
    monkeypatch.setattr(frame, "environment", lambda: {"sources": "a"})
    sections = {name: frame.SECTIONS[name] for name in ("build", "graph_step", "action_cpu")}
    assert gpu_session.run(sections, tmp_path, sum(sections.values())) == 0
    # Nothing took time, so each gets its share of all that is left.
    assert allowed == [90, 152, 190]


def test_sections_that_time_nothing_run_side_by_side(tmp_path, monkeypatch):
    # Each waits for the other.
    meet = threading.Barrier(2, timeout=30)

    def run_section(name, *_):
        if name != "build":
            meet.wait()
        return {"outcome": "ok", "figures": {}}

    monkeypatch.setattr(frame, "run_section", run_section)
    monkeypatch.setattr(frame, "environment", lambda: {"sources": "a"})
    assert frame.batches(["build", "green", "pools", "makespan", "peers"]) == [
        ["build"],
        ["green", "pools"],
        ["makespan"],
        ["peers"],
    ]
    assert gpu_session.run({"build": 1, "green": 1, "pools": 1}, tmp_path, 10) == 0


def test_sections_end_with_the_session(tmp_path, monkeypatch):
    begun = threading.Event()

    def run_section(name, folder, *_):
        command = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"]
        begun.set()
        return frame.run_alone(command, folder / name, 60)

    def interrupted(ends):
        assert begun.wait(30)
        while not all((tmp_path / name).exists() for name in ("green", "pools")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(frame, "run_section", run_section)
    monkeypatch.setattr(frame, "as_completed", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(frame.run_sections(["green", "pools"], tmp_path, 60))
    assert time.monotonic() - start < 30


def test_a_section_that_lacks_a_module_or_a_program_says_so(monkeypatch):
    monkeypatch.setitem(frame.NEEDS, "green", ("json", "no_such_module", "no-such-program"))
    missing = "no_such_module (ModuleNotFoundError: No module named 'no_such_module')"
    assert frame.lacking("green") == [missing, "no-such-program"]
    assert frame.NEEDS.keys() == frame.SECTIONS.keys()


def test_a_section_that_does_not_notice_its_fault_fails(tmp_path):
    def control():
        """A fault."""
        return False

    section = SimpleNamespace(run=lambda folder: {"right": True}, control=control)
    with pytest.raises(RuntimeError, match="does not notice its planted fault: A fault"):
        one.figures(section, tmp_path)
    section.control = lambda: True
    assert one.figures(section, tmp_path) == {"right": True}


@no_gpu
def test_a_section_that_fails_is_a_result(tmp_path):
    result = frame.run_section("capture_copy", tmp_path, 60)
    assert result["outcome"] == "failed"
    assert "Traceback" in result["error"]


def test_a_section_without_time_is_not_started(tmp_path):
    assert frame.run_section("green", tmp_path, 3)["outcome"] == "not started"


def test_a_section_out_of_time_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setitem(frame.SECTIONS, "green", 0.2)
    monkeypatch.setattr(frame, "LEAST_S", 0)
    assert frame.run_section("green", tmp_path, 60)["outcome"] == "out of time"


def test_every_section_is_in_a_run_that_fits_into_nine_minutes():
    modules = {path.stem for path in (ROOT / "bench/gpu").glob("*.py")}
    sections = {
        name for name in modules if "def run(folder" in (ROOT / f"bench/gpu/{name}.py").read_text()
    }
    assert sections == frame.SECTIONS.keys()
    for run in frame.RUNS.values():
        assert next(iter(run)) == "build"
        # Half a minute for what is around the sections.
        assert sum(max(run[name] for name in batch) for batch in frame.batches(run)) <= 540 - 30


# Prints the number of a process that it leaves behind, and hangs.
LEAVES_A_CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
if len(sys.argv) > 1:
    time.sleep(60)
"""


def is_running(process: int) -> bool:
    """Whether a process is there, and not only until somebody asks how it ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("hangs", [True, False])
def test_nothing_goes_on_that_a_section_has_started(tmp_path, hangs):
    log = tmp_path / "section.log"
    command = [sys.executable, "-c", LEAVES_A_CHILD, *["hangs"] * hangs]
    code = frame.run_alone(command, log, limit_s=2 if hangs else 60)
    assert code == (None if hangs else 0)
    child = int(log.read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_later_run_builds_again_and_skips_what_has_succeeded(tmp_path, monkeypatch):
    ran = []

    def run_section(name, *_):
        ran.append(name)
        return {"outcome": "ok", "figures": {}}

    monkeypatch.setattr(frame, "run_section", run_section)
    monkeypatch.setattr(frame, "environment", lambda: {"sources": "a"})
    for _ in range(2):
        assert gpu_session.run({"build": 1, "green": 1}, tmp_path, 10) == 0
    assert ran == ["build", "green", "build"]


def test_a_session_of_few_sections_gives_them_more_time(tmp_path, monkeypatch):
    monkeypatch.setitem(frame.SECTIONS, "green", 0.2)
    monkeypatch.setattr(frame, "LEAST_S", 0)
    took_s = frame.run_section("green", tmp_path, 60, stretch=2)["took_s"]
    assert took_s == pytest.approx(0.4)


def test_results_are_resumed_for_the_same_sources_only(tmp_path):
    path = tmp_path / "session.json"
    kept = {"environment": {"sources": "a"}, "sections": {"green": {"outcome": "ok"}}}
    frame.save(path, kept)
    assert frame.resume(path, {"sources": "a"}) == kept
    assert frame.resume(path, {"sources": "b"})["sections"] == {}


def test_the_sources_have_one_digest_until_one_changes(tmp_path, monkeypatch):
    for name in frame.SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    for name in ("csrc", "cmake", "pykern", "schedules", "bench"):
        (tmp_path / name).mkdir(exist_ok=True)
    for name in ("CMakeLists.txt", "pyproject.toml", "csrc/a.cpp", "pykern/b.py"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(frame, "ROOT", tmp_path)
    before = frame.digest()
    assert frame.digest() == before
    (tmp_path / "csrc/a.cpp").write_text("other")
    assert frame.digest() != before


PLANS = [gpipe(4, 8), one_f_one_b(4, 8), interleaved(4, 8, 2), hanayo(4, 8, 2)]


@pytest.mark.parametrize("plan", PLANS, ids=["gpipe", "1f1b", "interleaved", "hanayo"])
def test_spinning_pipelines_are_issued_behind_their_inputs(plan):
    order = overlap.in_order(plan)
    issued: set[Action] = set()
    for _, action in order:
        assert issued.issuperset(overlap.inputs(action, plan.num_stages))
        issued.add(action)
    # Each row as it stands in the plan, so that streams run what devices would.
    for device, row in enumerate(plan.rows):
        assert [action for on, action in order if on == device] == list(row)

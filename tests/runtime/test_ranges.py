"""The view of a profiler: one NVTX range per action, told by a recorder in its place."""

import importlib.util
import os
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import starmap
from pathlib import Path

import pytest

from pykern import _C
from pykern.plan import Action, Kind, Plan, lower, with_reductions
from pykern.plan.drawing.colours import colours_of
from pykern.schedules import one_f_one_b
from tests.diagonal import nightly
from tests.runtime.plans import split_backward, two_replicas
from tests.support import programs

ROOT = Path(__file__).parents[2]
RECORDER = ROOT / "tests/nvtx_injection/recorder.cpp"
PLANS = {
    "one_f_one_b(2, 4)": one_f_one_b(2, 4),
    "split_backward(one_f_one_b(3, 4))": split_backward(one_f_one_b(3, 4)),
    "two_replicas(2, 4)": two_replicas(2, 4),
}
# Every run has one of them on workers, and another on GPUs.
FIRST, SECOND, THIRD = PLANS
WORKER_PLANS = [FIRST, nightly(SECOND), nightly(THIRD)]
GPU_PLANS = [nightly(FIRST), SECOND, nightly(THIRD)]

pytestmark = pytest.mark.skipif(not _C.nvtx_built, reason="built without NVTX's header")

# A step of the plan that is named, with a stage that may raise in its third forward.
PROGRAM = """
import sys
import torch
from torch import nn
import pykern
from pykern.schedules import one_f_one_b
from tests.diagonal import nightly
from tests.runtime.plans import split_backward, two_replicas

class Third(nn.Linear):
    calls = 0
    def forward(self, x):
        Third.calls += 1
        if Third.calls == 3:
            raise ValueError("the third call")
        return super().forward(x)

plan = eval(sys.argv[1])
last = Third(3, 3) if sys.argv[2:] else nn.Linear(3, 3)
layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(plan.num_stages - 1)), last)
pipe = pykern.Pipeline(layers, devices=f"cpu:{plan.num_devices}", schedule=plan,
                       loss_fn=nn.functional.mse_loss, balance="layers")
try:
    pipe.step(torch.ones(8, 3), target=torch.ones(8, 3))
except ValueError as error:
    print(error)
pipe.close()
"""

# Two steps of the plan on GPUs of the fake driver, none of which reaches another.
GPU_PROGRAM = """
import sys
import torch
from torch import nn
import pykern
from pykern.runtime.gpu import cuda
from pykern.schedules import one_f_one_b
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus
from tests.diagonal import nightly
from tests.runtime.plans import split_backward, two_replicas

plan = eval(sys.argv[1])
HostGpus.fake = FakeCuda(plan.num_devices)
HostGpus.fake.allow_undeclared()
HostGpus.fake.set_peer(0, 1, False)
cuda.Gpus = HostGpus
torch.version.cuda = "13.0"
torch.cuda.device_count = lambda: plan.num_devices
layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(plan.num_stages)))
pipe = pykern.Pipeline(layers, devices="cuda", schedule=plan, loss_fn=nn.functional.mse_loss,
                       balance="layers")
for _ in range(2):
    pipe.step(torch.ones(8, 3), target=torch.ones(8, 3))
pipe.close()
"""


@dataclass
class Record:
    """The lines that the recorder wrote."""

    domains: dict[str, str] = field(default_factory=dict)
    categories: dict[str, str] = field(default_factory=dict)
    threads: dict[str, str] = field(default_factory=dict)
    # Names of streams.
    resources: Counter[str] = field(default_factory=Counter)
    # Thread, domain, category, text, payload, colour.
    ranges: list[tuple[str, str, str, str, int, str]] = field(default_factory=list)
    # The same of ranges around steps.
    steps: list[tuple[str, str, str, str, int, str]] = field(default_factory=list)


def read(path: Path) -> Record:
    """Fails unless each action's range is closed on its thread before the next one there."""
    record = Record()
    open_ranges: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        match line.split(maxsplit=3):
            case ["domain", number, name]:
                record.domains[number] = name
            case ["category", _, number, name]:
                assert record.categories.setdefault(number, name) == name
            case ["thread", number, *name]:
                record.threads[number] = " ".join(name)
            case ["resource", domain, *name]:
                assert record.domains[domain] == "pykern"
                record.resources[" ".join(name)] += 1
            case ["push", thread, domain, rest]:
                category, payload, colour, text = rest.split(maxsplit=3)
                of = record.steps if text == "step" else record.ranges
                name, kind = record.domains[domain], record.categories[category]
                of.append((thread, name, kind, text, int(payload), colour))
                open_ranges[thread] += 1
                # On GPUs one thread has the range of the step around those of its actions.
                in_step = thread in {entry[0] for entry in record.steps}
                assert open_ranges[thread] <= 1 + in_step
            case ["pop", thread, _]:
                open_ranges[thread] -= 1
                assert open_ranges[thread] >= 0
            case _:
                pytest.fail(f"unexpected: {line}")
    assert not open_ranges.total(), "a range was left open"
    return record


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Path:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    includes = [path for root in roots for path in root.glob("*/include")]
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    flags = [f"-isystem{path}" for path in [*includes, toolkit / "include"]]
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC", "-Wall", "-Werror"]
    subprocess.run([*command, *flags, RECORDER, "-o", library], check=True)
    return library


@pytest.fixture(scope="module")
def run(recorder, tmp_path_factory):
    # The run that several tests look at is made once.
    @cache
    def steps(*arguments: str, program: str = PROGRAM) -> tuple[Record, str]:
        path = tmp_path_factory.mktemp("ranges") / "record"
        recording = {"NVTX_INJECTION64_PATH": str(recorder), "PYKERN_RECORD": str(path)}
        done = programs.run(program, *arguments, environment=os.environ | recording)
        assert done.returncode == 0, done.stderr
        return read(path), done.stdout

    return steps


def expected_range(device: int, action: Action) -> tuple[str, str, str, int, str]:
    name = action.kind.name
    category = "COPY" if action.kind in (Kind.COPY_F, Kind.COPY_B) else name
    payload = device << 48 | action.stage << 32 | action.microbatch
    colour = "ff" + colours_of(action.kind, 0, 1).fill[1:]
    return "pykern", category, f"{name} s{action.stage}", payload, colour


def actions_of(plan: Plan) -> list[tuple[int, Action]]:
    """All actions, with their devices."""
    return [(device, action) for device, row in enumerate(plan.rows) for action in row]


STEP = ("pykern", "STEP", "step", 0, "ff5a5a5a")


@pytest.mark.parametrize("plan", WORKER_PLANS)
def test_one_range_per_action(run, plan):
    record, _ = run(plan)
    actions = actions_of(with_reductions(PLANS[plan]))
    assert len(actions) >= 16
    assert Counter(entry[1:] for entry in record.ranges) == Counter(
        starmap(expected_range, actions)
    )
    assert [entry[1:] for entry in record.steps] == [STEP]


def test_the_domain_names_its_categories_once(run):
    record, _ = run("one_f_one_b(2, 4)")
    assert [name for name in record.domains.values() if name == "pykern"] == ["pykern"]
    names = ["F", "R", "B", "I", "W", "U", "COPY", "REDUCE", "STEP"]
    assert record.categories == {str(i): name for i, name in enumerate(names, 1)}


def test_ranges_are_on_threads_that_are_named_after_their_devices(run):
    record, _ = run("one_f_one_b(2, 4)")
    assert sorted(record.threads.values()) == ["pykern dev0", "pykern dev1"]
    assert {entry[0] for entry in record.ranges} <= set(record.threads)


def test_a_stage_that_raises_closes_its_range(run):
    record, output = run("one_f_one_b(2, 4)", "raise")
    assert output == "the third call\n"
    actions = Counter(entry[1:] for entry in record.ranges)
    assert actions[expected_range(1, Action(Kind.F, 1, 2))] == 1
    assert actions[expected_range(1, Action(Kind.B, 1, 3))] == 0
    assert max(actions.values()) == 1


@pytest.mark.parametrize("plan", GPU_PLANS)
def test_on_gpus_one_range_per_action_and_per_copy(run, plan):
    record, _ = run(plan, program=GPU_PROGRAM)
    whole = with_reductions(PLANS[plan])
    copies = [(lane.sender, copy.action) for lane in lower(whole).lanes for copy in lane.copies]
    assert len(copies) >= 8
    once = Counter(starmap(expected_range, actions_of(whole) + copies))
    assert Counter(entry[1:] for entry in record.ranges) == once + once
    assert [entry[1:] for entry in record.steps] == [STEP, STEP]
    # All of them are the caller's, who has a name already.
    assert len({entry[0] for entry in record.ranges}) == 1
    assert not record.threads


def test_streams_are_named_after_their_devices(run):
    record, _ = run("one_f_one_b(2, 4)", program=GPU_PROGRAM)
    # Copy streams belong to a program; a pipeline has one to train and one to predict.
    assert record.resources == {
        "pykern dev0 compute": 1,
        "pykern dev1 compute": 1,
        "pykern dev0 > dev1 F": 2,
        "pykern dev0 > dev1 F landing": 2,
        "pykern dev1 > dev0 B": 1,
    }

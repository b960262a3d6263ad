"""A recording by the real Nsight Systems, where it is installed, against the runtime's timeline."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykern import _C
from pykern.nsight import read
from pykern.nsight.export import tables_of
from pykern.nsight.tables import steps_of
from pykern.plan import Timeline
from pykern.recorded.profile import plan_of, timeline_of
from pykern.schedules import interleaved
from tests.support.recordings import Times, assert_last_as_long, times_of

pytestmark = [
    pytest.mark.skipif(not _C.nvtx_built, reason="built without NVTX's header"),
    pytest.mark.skipif(shutil.which("nsys") is None, reason="Nsight Systems is not installed"),
]

NUM_STEPS = 4
PROGRAM = """
import json
import sys
import torch
from torch import nn
import pykern

torch.set_num_threads(1)
layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
batch = torch.randn(128, 256)
with pykern.Pipeline(layers, devices="cpu:2", microbatches=4, schedule="interleaved",
                     num_chunks=2, loss_fn=nn.functional.mse_loss) as pipe:
    for _ in range(int(sys.argv[1])):
        pipe.step(batch, target=batch)
    rows = [[(str(span.action), span.end_ns - span.start_ns) for span in row]
            for row in pipe.timeline().rows]
with open(sys.argv[2], "w") as out:
    json.dump(rows, out)
"""


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Times]:
    """The report, and each action of the last step with its time as the runtime saw it."""
    folder = tmp_path_factory.mktemp("nsys")
    rows = folder / "rows.json"
    command = ["nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none"]
    command += ["--output", str(folder / "step"), sys.executable, "-c", PROGRAM]
    subprocess.run([*command, str(NUM_STEPS), rows], check=True, capture_output=True)
    # Where nsys finds no importer, it leaves the recording itself.
    [report] = [path for path in folder.iterdir() if path.suffix in (".nsys-rep", ".qdstrm")]
    return report, json.loads(rows.read_text())


def last_step(report: Path) -> Timeline:
    with tables_of(report) as tables:
        steps = steps_of(tables)
    assert len(steps) == NUM_STEPS
    return timeline_of(steps[-1])


def test_each_action_is_there_once_and_lasts_as_long(recorded):
    report, expected = recorded
    assert_last_as_long(times_of(last_step(report)), expected)


def test_the_plan_is_read_back(recorded):
    report, _ = recorded
    assert plan_of(last_step(report)) == interleaved(2, 4, num_chunks=2)


def test_the_profile_has_all_steps(recorded):
    report, _ = recorded
    profile = read(report)
    assert profile.seen.num_steps == NUM_STEPS
    assert "warm-up and cool-down" in str(profile)
    assert f"{NUM_STEPS} steps in 4 microbatches, 4 stages on 2 devices" in profile.summary()


@pytest.mark.timeout(120)
def test_the_command_records_a_script_and_ends_it(tmp_path):
    script, report = tmp_path / "train.py", tmp_path / "step.nsys-rep"
    script.write_text(PROGRAM + "import time\ntime.sleep(1000)\n")
    command = [sys.executable, "-c", "from pykern.cli import main; main()"]
    # A busy machine needs many of these seconds before the first step.
    command += ["nsys", "--seconds", "20", report, script, str(NUM_STEPS), tmp_path / "rows.json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"{NUM_STEPS} steps in 4 microbatches, 4 stages on 2 devices" in done.stdout
    assert report.exists()

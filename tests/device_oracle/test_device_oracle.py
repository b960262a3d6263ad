"""Steps, captures and loops on GPUs, each in a process of its own."""

import re
from pathlib import Path

import pytest
import torch

from bench.shared_library import ROOT
from tests.device_oracle import library
from tests.fake_cuda import fake
from tests.support import programs

CALLED = ("steps", "operations called", "allocations in memory used before", "waits for events")
SEEN = {
    "steps_on_gpus.py": (*CALLED, "copies"),
    "threads_on_gpus.py": (*CALLED, "copies"),
    "batches_on_gpus.py": CALLED,
    "host_on_gpus.py": (*CALLED, "copies between a GPU and the host", "captures"),
    "captures_on_gpus.py": (*CALLED, "captures", "graph launches", "operations replayed"),
    "refusals_on_gpus.py": (*CALLED, "captures", "graph launches"),
    "loops_on_gpus.py": CALLED,
    "boxes_on_gpus.py": ("operations called",),
    "tune_on_gpus.py": (*CALLED, "copies"),
    "sections_on_gpus.py": ("captures", "graph launches"),
}


# The limit of one test, which is this one's: on a busy machine a benchmark of a box has taken 41 s.
LIMIT_S = 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has GPUs of its own")
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("name", SEEN)
def test_torchs_own_engine_runs(name: str) -> None:
    # Compiled here, so that the first test in the process does not take the time of a compiler.
    fake.build()
    library.build()
    options = ["-qx", "-n0", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}"]
    steps = Path(__file__).with_name(name)
    program = programs.MODULE.format(name="pytest")
    done = programs.run(program, *options, str(steps), timeout=LIMIT_S, folder=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    print(seen := done.stdout.splitlines()[-1])
    for what in SEEN[name]:
        assert re.search(rf"\b[1-9][\d,]* {what}", seen), seen

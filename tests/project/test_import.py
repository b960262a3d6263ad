"""What an import costs and what it drags in, each in a fresh interpreter."""

import pytest

MEASURE_IMPORT = """
import time, torch
before = time.process_time()
from pykern import *
print(time.process_time() - before)
"""

NEW_LIBRARIES = """
import torch
from pathlib import Path
def libraries():
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
before = libraries()
from pykern import *
import pykern._C
print(*sorted(path for path in libraries() - before if ".so" in path), sep="\\n")
"""


def test_import_takes_less_than_a_fifth_of_a_second_more_than_torch(python):
    # Of its own: what else the machine does is no fault of ours. Files may have to be read once.
    runs = [python("-c", MEASURE_IMPORT) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.2


def test_import_loads_no_cuda_library(python):
    libraries = python("-c", NEW_LIBRARIES).stdout.splitlines()
    assert any("_C." in path for path in libraries), libraries
    assert [path for path in libraries if "cuda" in path or "nccl" in path] == []


@pytest.mark.parametrize("module", ["pykern", "pykern.plan", "pykern.schedules"])
def test_planning_imports_no_torch(python, module):
    ran = python("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert ran.stdout == "False\n"

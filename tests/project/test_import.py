"""The cost of an import and the modules it drags in, each in a fresh interpreter."""

import pytest

NEW_PACKAGES = """
import sys, torch
before = set(sys.modules)
from pykern import *
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
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


def test_import_drags_in_nothing_but_checkpoints_format(python):
    # How long it takes beside torch is measured by bench/bench_import.py.
    found = set(python("-c", NEW_PACKAGES).stdout.split())
    assert found == {"pykern", "safetensors"}


def test_import_loads_no_cuda_library(python):
    libraries = python("-c", NEW_LIBRARIES).stdout.splitlines()
    assert any("_C." in path for path in libraries), libraries
    assert [path for path in libraries if "cuda" in path or "nccl" in path] == []


@pytest.mark.parametrize(
    "module",
    [
        "pykern",
        "pykern.plan",
        "pykern.schedules",
        "pykern.nsight",
        "pykern.kineto",
        "pykern.benchmark",
    ],
)
def test_planning_and_reading_import_no_torch(python, module):
    ran = python("-c", f"import sys, {module}; print('torch' in sys.modules)")
    assert ran.stdout == "False\n"


@pytest.mark.parametrize("name", ["checkpoint.save", "search.auto", "plan.Plan", "scale.Mesh"])
def test_packages_for_users_come_with_the_import(python, name):
    assert python("-c", f"import pykern; print(callable(pykern.{name}))").stdout == "True\n"

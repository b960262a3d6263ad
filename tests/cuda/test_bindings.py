"""The GPU session calls the driver as cuda-bindings has it: the package over the fake driver.

The package comes with every torch for CUDA.
"""

import subprocess
import sys

import pytest

from bench.shared_library import ROOT
from tests.fake_cuda.fake import build

pytest.importorskip("cuda.bindings.driver")

SCRIPT = """
from types import SimpleNamespace
import torch
from bench.gpu import green, groups, tools
from tests.fake_cuda.fake import FakeCuda

torch.cuda.init = torch.cuda.synchronize = lambda *_: None
torch.cuda.ExternalStream = lambda handle, device: SimpleNamespace(cuda_stream=handle)
fake = FakeCuda(1)
fake.allow_undeclared()
fake.retain(0)
cu, stream = tools.driver(), tools.own_stream().cuda_stream
to, source = torch.zeros(4), torch.ones(4)
tools.checked(cu.cuMemcpyAsync(to.data_ptr(), source.data_ptr(), 16, stream))
whole, part = tools.checked(cu.cuGraphCreate(0)), tools.checked(cu.cuGraphCreate(0))
tools.checked(cu.cuGraphAddChildGraphNode(whole, [], 0, int(part)))
executable = tools.checked(cu.cuGraphInstantiate(whole, 0))
tools.checked(cu.cuGraphLaunch(int(executable), stream))
tools.checked(cu.cuStreamSynchronize(stream))
assert to.tolist() == [1] * 4
of_groups = groups.split(4, 32)
assert [group.num_multiprocessors for group in of_groups] == [32] * 4
print(green.event_rules(of_groups[1].stream(), SimpleNamespace(cuda_stream=stream)))
print([text for text in fake.violations if "cuGetProcAddress" not in text])
"""


def test_sections_call_the_driver_as_the_package_has_it(tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(build())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, violations = done.stdout.splitlines()
    assert answers == "{'record': 'CUDA_ERROR_INVALID_HANDLE', 'wait': 'CUDA_SUCCESS'}"
    assert violations == "['cuEventRecord: the event is of another context than the stream']"

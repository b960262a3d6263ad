"""The calls around a launch, shown without a GPU."""

import ast
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pykern import kernels
from pykern.kernels import handover
from pykern.kernels.operation import _Launcher

# The module of each twin, and its name there.
TWINS = [
    (path.stem, ast.unparse(call.args[1]))
    for path in sorted(Path(kernels.__path__[0]).glob("*.py"))
    for call in ast.walk(ast.parse(path.read_text()))
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "define"
]


def test_a_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    current = []

    @contextmanager
    def device(wanted):
        current.append(wanted)
        yield
        current.pop()

    def launched(x):
        return x.device, list(current)

    monkeypatch.setattr(torch.cuda, "device", device)
    launcher = _Launcher(lambda x: None)
    launcher._function = launched
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
        assert launcher(x) == (x.device, [torch.device("cuda", 1)])
    assert current == []


@pytest.mark.parametrize(("module", "name"), TWINS)
def test_a_twin_has_a_launcher_of_its_name(module, name):
    pytest.importorskip("triton")
    twin = getattr(import_module(f"pykern.kernels.{module}"), name)
    launcher = getattr(import_module(f"pykern.kernels.gpu.{module}"), name)
    assert _Launcher(twin)._find() is launcher


def test_what_is_taken_comes_from_this_thread():
    # Where autograd may use threads of its own, it does for CUDA tensors.
    assert torch._C._is_multithreading_enabled()
    with handover.taking(lambda node, weights: None):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()

"""The calls around a launch, shown without a GPU."""

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pykern.kernels import handover
from pykern.kernels.operation import _Launcher


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
    launcher = _Launcher("no_such_module:launched", lambda x: None)
    launcher._function = launched
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
        assert launcher(x) == (x.device, [torch.device("cuda", 1)])
    assert current == []


def test_what_is_taken_comes_from_this_thread():
    # Where autograd may use threads of its own, it does for CUDA tensors.
    assert torch._C._is_multithreading_enabled()
    with handover.taking(lambda node, weights: None):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()

"""Settings and fixtures of all tests. It does not import torch: the tests of the planner run
without it."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda.fake import FakeCuda

# Triton reads it when a kernel is defined. A process either interprets kernels on tensors of the
# CPU, whether there is a GPU or not, or compiles them for the tests that are marked gpu.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Where processes share the cores, threads of torch that spin while they wait for each other hold up
# those that they wait for. OpenMP reads it when torch is imported, here and in what tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples on every run, and no deadline: another process on the machine is not a failure.
settings.register_profile("pykern", derandomize=True, deadline=None)
# Faults that sanitizers look for show in any example.
settings.register_profile("few", settings.get_profile("pykern"), max_examples=15)
settings.load_profile(os.environ.get("PYKERN_EXAMPLES", "pykern"))


def pytest_configure() -> None:
    # An import of pykern in a fresh interpreter, of which many start here, takes four times as long
    # where it finds nothing compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell makes what it starts in the background ignore both, and that is inherited:
    # without this, neither this process nor the programs that tests start would notice them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    # The first test of hypothesis makes a generator, and warns unless the garbage collector finds
    # the generator's holder. In Python 3.14 `gc.freeze` hides a holder from before.
    given(st.none())(lambda _: None)()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    # Leftovers of a test are not looked for among older objects, which takes a second each time.
    gc.freeze()
    try:
        return (yield)
    finally:
        gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch  # noqa: PLC0415

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        if os.environ["TRITON_INTERPRET"] != "0":
            pytest.skip("needs compiled kernels: run TRITON_INTERPRET=0 pytest -m gpu")


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """A fresh fake driver of two devices; in the end no rule is broken and nothing is left."""
    fake = FakeCuda()
    yield fake
    fake.close()
    assert fake.violations == []
    assert fake.leaks == []

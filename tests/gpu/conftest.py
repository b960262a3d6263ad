"""Where the tests of pipelines run: on the GPU there is, else on the host by the fake driver."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda.host_gpus import host_gpus

# cuBLAS reads it when torch first asks for it: only then are its sums the same in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def home(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the plain model runs, and what pykern takes for GPU 0."""
    if request.param == "gpu":
        yield torch.device("cuda", 0)
    else:
        with host_gpus(1):
            yield torch.device("cpu")


@pytest.fixture(params=[pytest.param("gpu", marks=pytest.mark.gpu)])
def real_home() -> torch.device:
    """The one GPU, where tests elsewhere have the fake driver's GPUs, at every count."""
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _same_bits_in_every_run() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)

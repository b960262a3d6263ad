"""The GPUs of the files that test_device_oracle.py runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import frame
from tests.device_oracle.oracle import gpus
from tests.fake_cuda.fake import FakeCuda

# torch says so of results that a kernel makes itself, which is how the oracle has the CPU's.
IGNORED = ["An output with one or more elements was resized"]
if torch.__version__ < "2.13":
    # The first is of each gradient that goes from one GPU to another, the second of torch.export.
    IGNORED += ["The AccumulateGrad node's stream", "The given buffer is not writable"]


def pytest_itemcollected(item: pytest.Item) -> None:
    for text in IGNORED:
        item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-session", type=Path, help="a file for the figures of sections")


@pytest.fixture(scope="session")
def sections(pytestconfig: pytest.Config) -> Iterator[dict[str, Any]]:
    """The sections that have run, in the form of a GPU session's."""
    found: dict[str, Any] = {}
    yield found
    if path := pytestconfig.getoption("--keep-session"):
        done = {name: {"outcome": "ok", "figures": of} for name, of in found.items()}
        frame.save(path, {"environment": frame.environment(), "sections": done})


@pytest.fixture
def four_gpus() -> Iterator[FakeCuda]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with gpus(4) as fake:
        yield fake

"""Shared by the tests of other libraries' faces. Many hold torch.distributed.pipelining beside."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.runtime.conftest import _one_thread_and_a_seed

# Modules that follow torch.distributed.pipelining need torch 2.13 (docs/versions.md). Their import
# is refused by an older torch, on which the tests of these run alone.
ON_ANY_TORCH = (
    *("behaviours", "torchgpipe", "generate", "hugging_face", "quantised"),
    *("peft", "peft_changes", "peft_dropout"),
)
if torch.__version__ < "2.13":
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.stem.removeprefix("test_") not in ON_ANY_TORCH
    ]

__all__ = ["_group_of_one", "_one_thread_and_a_seed"]


@pytest.fixture(scope="module")
def _group_of_one() -> Iterator[None]:
    """torch's stages need a process group, if only of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

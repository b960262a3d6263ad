"""Pinned memory of the host for the tensors of a stage."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pykern.runtime.gpu.host_link import GpuLink


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randn(4, 3).t(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda like: f"{like.dtype} {tuple(like.shape)} in {like.stride()}",
)
def test_a_buffer_is_as_long_as_its_values_which_have_the_order_of_the_tensor(like: Tensor) -> None:
    given: list[Tensor] = []

    def pinned(num_bytes: int) -> Tensor:
        given.append(torch.empty(num_bytes, dtype=torch.uint8))
        return given[-1]

    gpus: Any = SimpleNamespace(pinned=pinned)
    buffer = GpuLink(gpus, 0).buffer(like, torch.float32)
    assert buffer.dtype == torch.float32
    assert buffer.shape == like.shape
    assert torch.argsort(torch.tensor(buffer.stride())).equal(
        torch.argsort(torch.tensor(like.stride()))
    )
    # torch would replace memory that is too small by its own, which is not pinned.
    assert [memory.numel() for memory in given] == [4 * like.numel()]
    assert buffer.untyped_storage().nbytes() == 4 * like.numel()

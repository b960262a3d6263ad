"""Copies by a kernel: in Triton's interpreter, and as compiled for sm_90."""

import pytest
import torch

from pykern.topo.kernel_copy import kernel_copy
from tests.kernels.sm90 import compiled_for_sm90


@pytest.mark.parametrize("num_bytes", [4, 4096, 3 * 8192 + 4])
def test_all_bytes_are_copied_and_no_others(num_bytes: int) -> None:
    source = torch.arange(num_bytes + 8).to(torch.uint8)
    into = torch.zeros(num_bytes + 8, dtype=torch.uint8)
    kernel_copy(into[:num_bytes], source[:num_bytes])
    assert torch.equal(into[:num_bytes], source[:num_bytes])
    assert not into[num_bytes:].any()


LAUNCH = """
import torch
from pykern.topo.kernel_copy import kernel_copy
kernel_copy(*(torch.empty(2**20, dtype=torch.uint8) for _ in range(2)))
"""


@pytest.mark.slow
def test_a_thread_moves_16_bytes_at_a_time() -> None:
    [kernel] = compiled_for_sm90(LAUNCH)
    assert kernel.accesses("LDG") == kernel.accesses("STG") == {128: 4}
    assert kernel.spills == 0

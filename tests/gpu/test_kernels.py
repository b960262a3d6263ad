"""Fused operations as compiled for the GPU, beside plain torch on it."""

import pytest
import torch

from bench.gpu import kernels
from pykern.topo.kernel_copy import kernel_copy

pytestmark = pytest.mark.gpu

SHAPES = {"small": (6, 256, 64), "llama": (256, 4096, 14336)}
NAMES = [name for name, _ in kernels.operations(torch.device("cpu"), 2, 128, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_gives_what_plain_torch_gives(name: str, shape: str) -> None:
    operations = dict(kernels.operations(torch.device("cuda", 0), *SHAPES[shape]))
    kernels.check(operations[name], operations[name].ours)


def test_dropout_keeps_as_much_as_it_is_told() -> None:
    operation = dict(kernels.operations(torch.device("cuda", 0), 256, 4096, 64))["dropout"]
    (kept,) = kernels.results(operation.ours(*operation.arguments))
    assert (kept != 0).double().mean().item() == pytest.approx(0.9, abs=0.005)


def test_a_copy_by_a_kernel_moves_every_byte() -> None:
    source = torch.arange(2**20 + 4, device="cuda").to(torch.uint8)
    into = torch.zeros_like(source)
    kernel_copy(into, source)
    assert torch.equal(into, source)

"""Fused operations as compiled for the GPU, beside float64; on the host by Triton's interpreter."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle, product
from typing import Any

import pytest
import torch

from pykern.kernels.dropout import dropout
from pykern.topo.kernel_copy import kernel_copy
from tests.diagonal import nightly
from tests.kernels.acceptance import ulp
from tests.kernels.ptx import activations, losses, norms, tokens
from tests.kernels.ptx.outcome import SHAPES, Given
from tests.kernels.public import HALF_ULP, Sizes, check, launching, operations

LAUNCHED = norms.OPERATIONS | activations.OPERATIONS | losses.OPERATIONS | tokens.OPERATIONS
# Llama's columns; and sizes that nothing divides, but rows of 16 bytes for products of experts.
SIZES = {"llama": Sizes(64, 4096, 14336, 32000), "few": Sizes(5, 64, 48, 53)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES = list(operations(SIZES["few"]))
# Every run has each operation once on the host, in one of the types.
ON_HOST = [
    (name, dtype) if number % 3 == place else nightly(name, dtype)
    for number, name in enumerate(NAMES)
    for place, dtype in enumerate(DTYPES)
]
# Llama's rows in every type; each of the other layouts in one.
OTHERS = [name for name in SHAPES if name != "llama"]
CASES = [*product(["llama"], DTYPES), *zip(OTHERS, cycle(DTYPES), strict=False)]


@pytest.fixture(autouse=True)
def _float32_is_float32() -> Iterator[None]:
    """Products of the GPU do not round operands further than their type does."""
    kept = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = kept


@pytest.mark.parametrize(("name", "dtype"), ON_HOST)
def test_a_public_operation_is_near_float64_on_the_host(name: str, dtype: str) -> None:
    with launching():
        check(operations(SIZES["few"])[name], DTYPES[dtype], torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_a_public_operation_is_near_float64(name: str, sizes: str, dtype: str) -> None:
    check(operations(SIZES[sizes])[name], DTYPES[dtype], torch.device("cuda", 0))


def launched(name: str, shape: str, dtype: str, device: torch.device) -> int:
    """Launches kernels on tensors of a device, and compares as their interpreter does."""
    torch.manual_seed(1)
    on_device: Any = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, device:
        outcome = LAUNCHED[name](Given(SHAPES[shape], DTYPES[dtype]))
    return len(outcome.outputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("name", LAUNCHED)
def test_kernels_are_as_near_float64_as_one_rounding_is(name: str, shape: str, dtype: str) -> None:
    if "e4m3" in name and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU does not round to e4m3")
    assert launched(name, shape, dtype, torch.device("cuda", 0)) > 0


@pytest.mark.parametrize("name", ["rms_norm backward", "swiglu", "rope"])
def test_kernels_on_the_host_are_compared_in_the_same_way(name: str) -> None:
    assert launched(name, "padded", "float16", torch.device("cpu")) > 0


def test_an_operation_with_one_rounding_more_is_refused() -> None:
    """The limits see a result that is rounded twice, and one that is off by two ulps."""
    swiglu = operations(SIZES["few"])["swiglu"]

    def twice(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def two_ulps(x: torch.Tensor) -> torch.Tensor:
        return swiglu.ours(x) * (1 + 2.0**-6)

    for wrong in (twice, two_ulps):
        with pytest.raises(AssertionError, match="is off by"):
            check(swiglu._replace(ours=wrong), torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_keeps_as_much_as_it_is_told(dtype: str) -> None:
    x = torch.randn(256, 4096, device="cuda").to(DTYPES[dtype])
    kept = dropout(x, 0.1)
    assert (kept != 0).double().mean().item() == pytest.approx(0.9, abs=0.005)
    exact = torch.where(kept != 0, x.double() / 0.9, 0)
    allowed = 0.5 * ulp(exact, x.dtype) + 2.0**-23 * exact.abs()
    assert ((kept.double() - exact).abs() <= allowed).all()


@pytest.mark.gpu
def test_a_copy_by_a_kernel_moves_every_byte() -> None:
    source = torch.arange(2**20 + 4, device="cuda").to(torch.uint8)
    into = torch.zeros_like(source)
    kernel_copy(into, source)
    assert torch.equal(into, source)


def test_every_type_has_a_limit() -> None:
    assert set(DTYPES.values()) == HALF_ULP.keys()

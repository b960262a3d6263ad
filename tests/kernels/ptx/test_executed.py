"""Every kernel, compiled for several GPUs, executed and compared with float64."""

import re
from importlib.metadata import version
from itertools import product

import pytest

from tests.kernels.ptx.faults import FAULTS
from tests.kernels.ptx.save import CAPABILITIES, DTYPES, SHAPES, cell, planted, with_stack
from tests.kernels.test_launching import KERNELS

pytestmark = pytest.mark.skipif(
    not version("triton").startswith("3.7."), reason="another Triton emits other PTX"
)
# Kernels whose threads keep something in memory of their own. Eight bits of a mask go through it in
# the gradient of routing. For sm_120 two backwards have two registers too few.
HAVE_STACK = {"routing._gradient", "activation._backward", "norm_backward.backward"}
# Where rows are not aligned, the choice among 64 experts has 2,048 keys of 64 bits in 128 threads.
HAVE_STACK_UNALIGNED = HAVE_STACK | {"routing._choose", "norm_forward.forward"}
# Every run takes each operation once, on one of these.
PARTS = [
    (80, "bfloat16", "odd"),
    (90, "bfloat16", "llama"),
    (100, "float16", "padded"),
    (120, "float32", "odd"),
]


def check(found, shape):
    assert [line for line in found if "fault" in line] == []
    for line in found:
        if line["launches"]:
            assert 0 < line["loads"] + line["stores"] < line["instructions"], line
    known = HAVE_STACK if shape == "llama" else HAVE_STACK_UNALIGNED
    assert with_stack(found).keys() <= known


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(4))
def test_a_part_of_compiled_kernels_is_right(part):
    capability, dtype, shape = PARTS[part]
    found = cell(capability, dtype, shape, "--every", "4", "--first", str(part))
    assert len(found) >= 10
    check(found, shape)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", ["few", "fewest"])
def test_no_thread_reads_a_logit_that_another_overwrites(shape):
    """Gradients overwrite logits, so a second thread with the same element would race."""
    for capability, dtype in ((80, "bfloat16"), (120, "float32")):
        found = cell(capability, dtype, shape, "--only", "cross entropy")
        assert len(found) == 3
        check(found, shape)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("capability", "dtype", "shape"), [*product(CAPABILITIES, DTYPES, SHAPES)])
def test_compiled_kernels_are_right(capability, dtype, shape):
    found = cell(capability, dtype, shape)
    check(found, shape)
    executed = {kernel for line in found for kernel in line["kernels"]}
    if shape == "empty":
        # Routing tells sums without tokens, too.
        assert executed == {"routing._choose", "routing._place"}
    else:
        least = KERNELS - {"norm_forward.statistics", "norm_backward.sums"}
        assert least <= executed <= KERNELS
        assert shape != "llama" or executed == KERNELS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planted_faults_are_found():
    said = {line["fault"]: line["said"] for line in planted()}
    assert said.keys() == {fault.name for fault in FAULTS}
    for fault in FAULTS:
        assert fault.found in said[fault.name], fault.name
        # A fault of memory or order is told with its place.
        assert "AssertionError" in said[fault.name] or re.search(r"line \d+", said[fault.name])

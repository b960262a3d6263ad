"""Direct launches of compiled kernels; see `tests.kernels.launches` for what is compared."""

import json
import os

import pytest
import triton

from pykern.kernels.gpu.blocks import cdiv, next_power_of_2
from tests.support import programs

KERNELS = {
    "activation._forward",
    "activation._backward",
    "cross_entropy._kernel",
    "dropout._kernel",
    "norm_backward.add_parts",
    "norm_backward.backward",
    "norm_backward.sums",
    "norm_forward.forward",
    "norm_forward.statistics",
    "rope._kernel",
    "routing._choose",
    "routing._gradient",
    "routing._place",
    "row_sums._kernel",
    "stash._quantise",
    "stash._restore",
    "weighted_swiglu._gradients",
    "weighted_swiglu._product",
}


def test_direct_launches_equal_those_of_the_jit(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = programs.run(
        programs.MODULE.format(name="tests.kernels.launches"),
        environment=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == KERNELS
    for name, (num_launches, num_functions) in found.items():
        # Two functions at least: not all launches of a kernel are of one kind.
        assert num_launches > num_functions >= 2, (name, num_launches, num_functions)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 127, 128, 129, 2**31 + 1])
def test_numbers_of_blocks_are_those_of_triton(size):
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    for block in (1, 2, 3, 128):
        assert cdiv(size, block) == triton.cdiv(size, block)

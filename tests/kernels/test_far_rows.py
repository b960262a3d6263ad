"""Rows of routing, experts and rotary embedding whose offsets do not fit into 32 bits."""

from tests.support import programs

# Offsets that wrapped around would end the process.
SCRIPT = """
import torch
from pykern.kernels.gpu import rope, routing, row_sums, weighted_swiglu

room = torch.empty(2**31 + 4096, dtype=torch.float16)


def far(rows):
    # The third row begins after 2**31 elements.
    strides = (*[1024] * (rows.dim() - 2), 2**30, 1)
    return room.as_strided(rows.shape, strides).copy_(rows)


def check(function, near):
    expected = function(near)
    found = function(far(near))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


order = torch.tensor([1, 2, 0], dtype=torch.int32)
weights = torch.tensor([[0.25], [0.5], [0.75]])
rows = torch.randn(3, 12).half()
gradient = torch.randn(3, 6).half()
check(lambda x: routing.chosen(x, 2), rows)
check(lambda x: [routing.chosen_gradient(weights, x, order[:, None])], rows)
check(lambda x: [row_sums.summed(x, order[:, None])], rows)
check(lambda x: [weighted_swiglu.product(x, weights, order)], rows)
check(lambda x: weighted_swiglu.product_gradient(gradient, x, weights, order, True), rows)
check(lambda g: weighted_swiglu.product_gradient(g, rows, weights, order, False), gradient)
check(lambda x: rope.turned(x, 1, 1, 100.0, 3), rows)
others = torch.randn(2, 1, 3, 4).half().unbind(0)
check(lambda q: [rope.turned_back(q, *others, 100.0, 3)], torch.randn(2, 3, 4).half())
print("done")
"""


def test_offsets_beyond_32_bits():
    done = programs.run(SCRIPT)
    assert done.stdout == "done\n", done.stderr

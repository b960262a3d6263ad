import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pykern.kernels import cross_entropy as op
from pykern.kernels.gpu import cross_entropy as gpu
from tests.kernels.acceptance import Canaries, assert_accepted, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for_sm90
from tests.support import programs

IGNORED = -100
WAYS = {"twin": op, "kernel": gpu}


class Rows:
    """Logits somewhere in memory that is NaN, with targets; and what they should become."""

    def __init__(self, values: Tensor, target: Tensor, padding: int, gap: int, offset: int) -> None:
        num_rows, self.num_classes = values.shape
        width = self.num_classes + padding
        self.room = values.new_full((offset + num_rows * (width + gap),), float("nan"))
        matrix = self.room[offset:].view(num_rows, width + gap)
        matrix[:, : self.num_classes] = values
        self.logits = matrix[:, :width]
        self._gaps = [matrix[:, width:], self.room[:offset]]
        self.target = target
        self._values = values.double()

    def check(self, losses: Tensor, log_sums: Tensor, scale: Tensor | None) -> None:
        values, target = self._values, self.target
        counts = target != IGNORED
        exact = values.logsumexp(1)
        one = F.one_hot(target.clamp(min=0), self.num_classes) * counts[:, None]
        own = (values * one).sum(1)
        roundings = 1 + exact.abs() + values.abs().amax(1)
        assert_accepted(log_sums, exact, roundings)
        assert_accepted(losses, (exact - own) * counts, roundings + own.abs())
        if scale is not None:
            softmax = (values - exact[:, None]).exp() * counts[:, None]
            gradients = (softmax - one) * scale.double()
            terms = (softmax * (roundings[:, None] + values.abs()) + one) * scale.double().abs()
            assert_accepted(self.logits[:, : self.num_classes], gradients, terms)
            assert not self.logits[:, self.num_classes :].any()
        else:
            assert torch.equal(self.logits[:, : self.num_classes].double(), values)
        assert all(gap.isnan().all() for gap in self._gaps)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=10)
@given(
    num_rows=st.sampled_from([3, 1, 2, 0]),
    num_classes=st.sampled_from([70, 33, 16, 15, 2, 1]),
    padding=st.integers(0, 20),
    gap=st.integers(0, 3),
    offset=st.integers(0, 3),
    deviation=st.sampled_from([0.01, 1.0, 30.0]),
    scale=st.sampled_from([1.0, -0.37, None]),
    data=st.data(),
)
def test_rows_are_right(  # noqa: PLR0913, PLR0917 - what is drawn
    way, num_rows, num_classes, dtype, padding, gap, offset, deviation, scale, data
):
    labels = st.sampled_from([num_classes - 1, 0, num_classes // 2, IGNORED])
    target = torch.tensor(
        data.draw(st.lists(labels, min_size=num_rows, max_size=num_rows)), dtype=torch.int64
    )
    values = (torch.randn(num_rows, num_classes) * deviation).to(dtype)
    rows = Rows(values, target, padding, gap, offset)
    factor = None if scale is None else torch.tensor(scale)
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        if way == "kernel":
            patch.setattr(torch, "empty", canaries.empty)
            # More than one block in a row.
            patch.setattr(gpu, "_BLOCK", 32)
        losses, log_sums = WAYS[way].losses_of_rows(
            rows.logits, target, factor, num_classes, IGNORED
        )
    rows.check(losses, log_sums, factor)
    canaries.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_made_at_once_or_again(way, dtype):
    logits = torch.randn(5, 48).to(dtype)
    target = torch.tensor([3, IGNORED, 0, 46, 99])
    at_once, again, scale = logits.clone(), logits.clone(), torch.tensor(0.3)
    losses, log_sums = WAYS[way].losses_of_rows(at_once, target, scale, 47, IGNORED)
    WAYS[way].gradients_of_rows(again, log_sums, target, scale, 47, IGNORED)
    assert torch.equal(at_once.isnan(), again.isnan())
    assert torch.equal(at_once.nan_to_num(), again.nan_to_num())
    # A target that is not a class shows, in its row alone.
    assert losses.isnan().tolist() == [False] * 4 + [True]
    assert at_once[:, :47].isnan().all(1).tolist() == [False] * 4 + [True]
    assert not at_once[:4].isnan().any()


@pytest.mark.parametrize("way", WAYS)
def test_logits_may_be_infinite(way):
    logits = torch.full((2, 40), float("-inf"))
    logits[0, 35] = 2.0
    # NumPy, which interprets the kernel, warns.
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(gpu, "_BLOCK", 16)
        losses, log_sums = WAYS[way].losses_of_rows(
            logits, torch.tensor([35, 0]), torch.tensor(1.0), 40, IGNORED
        )
    assert log_sums.tolist() == [2.0, float("-inf")]
    assert losses[0] == 0
    assert losses[1].isnan()
    assert not logits[0].any()


def test_torch_accepts_the_operations():
    logits, target, scale = torch.randn(3, 16), torch.tensor([1, 4, IGNORED]), torch.tensor(0.5)
    operations = torch.ops.pykern
    for factor in (None, scale):
        torch.library.opcheck(
            operations.cross_entropy_losses.default, (logits.clone(), target, factor, 11, IGNORED)
        )
    torch.library.opcheck(
        operations.cross_entropy_gradients.default,
        (logits.clone(), torch.randn(3), target, scale, 11, IGNORED),
    )


FAR_ROWS = """
import torch
from pykern.kernels.gpu import cross_entropy as gpu
# A stride that fits into 32 bits, of which twice as much does not.
room = torch.empty(2**31 + 99, dtype=torch.float16)
logits = room.as_strided((3, 33), (2**30 + 16, 1))
values = torch.randn(3, 33).half()
logits.copy_(values)
near, target, scale = values.clone(), torch.tensor([2, 32, 0]), torch.tensor(1.0)
of_far = gpu.losses_of_rows(logits, target, scale, 33, -100)
of_near = gpu.losses_of_rows(near, target, scale, 33, -100)
assert torch.equal(logits, near)
assert all(map(torch.equal, of_far, of_near))
"""


def test_rows_may_lie_beyond_32_bits():
    done = programs.run(FAR_ROWS)
    assert done.returncode == 0, done.stderr


LAUNCHES = """
import torch
from pykern.kernels.gpu import cross_entropy as gpu
scale, target = torch.tensor(1.0), torch.zeros(4, dtype=torch.int64)
logits = torch.empty(4, 50272)
gpu.losses_of_rows(logits, target, scale, 50257, -100)
logits = logits.bfloat16()
_, log_sums = gpu.losses_of_rows(logits, target, None, 50257, -100)
gpu.losses_of_rows(logits, target, scale, 50257, -100)
gpu.gradients_of_rows(logits, log_sums, target, scale, 50257, -100)
"""


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    launches = [(32, 1, 1), (16, 1, 0), (16, 1, 1), (16, 0, 1)]
    for kernel, (bits, losses, gradients) in zip(kernels, launches, strict=True):
        assert kernel.spills == 0
        loads, stores = kernel.accesses("LDG"), kernel.accesses("STG")
        # 16 elements of a row at once, in each pass; the row's label, sums and scale besides.
        passes = loads.pop(128) * 128 // bits // 16
        assert sum(loads.values()) <= 3
        assert stores.pop(128, 0) * 128 // bits // 16 == gradients
        assert sum(stores.values()) == 2 * losses
        assert passes == losses + gradients
        assert kernel.num_instructions / (16 * passes) < 30

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pykern.kernels import dropout as op
from pykern.kernels import seeds
from pykern.kernels.dropout import dropout
from pykern.kernels.gpu import dropout as gpu
from pykern.kernels.gpu import rows
from pykern.kernels.philox import random_words
from tests.kernels.acceptance import Canaries, padded, uninitialised_is_nan
from tests.kernels.sm90 import compiled_for_sm90

SEEDS = st.integers(0, 2**63 - 1)


class OnlyOn(TorchDispatchMode):
    """Refuses operations whose results are elsewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        assert not isinstance(result, torch.Tensor) or result.device.type == self._kind, func
        return result


def philox(seed: int, counter: tuple[int, int, int, int], num_rounds: int = 7) -> list[int]:
    """By the paper, in numbers without bounds."""
    word = 2**32
    c = list(counter)
    key = [seed % word, seed // word]
    for _ in range(num_rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            second // word ^ c[1] ^ key[0],
            second % word,
            first // word ^ c[3] ^ key[1],
            first % word,
        ]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return c


def test_the_reference_is_philox():
    # Three of the authors' known answers, for ten rounds.
    assert philox(0, (0, 0, 0, 0), 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@given(SEEDS, st.integers(1, 3), st.integers(1, 9))
def test_words_are_philox_of_seed_and_place(seed, num_rows, num_columns):
    words = random_words(seed, num_rows, num_columns)
    for row in range(num_rows):
        for column in range(num_columns):
            assert words[row, column] == philox(seed, (column // 4, row, 0, 0))[column % 4]


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.integers(0, 5),
    offset=st.integers(0, 3),
    rate=st.sampled_from([0.0, 2.0**-32, 0.1, 0.5, 0.999, 1 - 2.0**-40]),
    seed=SEEDS,
)
def test_kernel_equals_twin(shape, dtype, padding, offset, rate, seed):
    x = torch.randn(shape).to(dtype)
    expected = op.masked(x, rate, seed, None)
    laid_out = padded(x, padding, offset) if shape else x
    canaries = Canaries()
    with pytest.MonkeyPatch.context() as patch, uninitialised_is_nan():
        patch.setattr(torch, "empty", canaries.empty)
        for result in (
            gpu.masked(laid_out, rate, seed, None),
            gpu.masked(laid_out, rate, 0, torch.tensor([seed])),
        ):
            assert torch.equal(result, expected)
    canaries.check()


def test_a_mask_does_not_depend_on_blocks(monkeypatch):
    x = torch.randn(7, 1030)
    expected = gpu.masked(x, 0.4, 2**40 + 1, None)
    for block in (64, 512, 8192):
        monkeypatch.setattr(gpu, "_BLOCK", block)
        assert torch.equal(gpu.masked(x, 0.4, 2**40 + 1, None), expected)


def test_grids_of_many_rows_and_columns(monkeypatch):
    # All but the first dimension of a grid have 65535 programs at most.
    num_rows, num_columns = 2**25, 2**29 + 1
    for shape in ((1, num_columns, 1, 256), (num_rows, 8, 4, 8), (num_rows, 9, 8, 8)):
        across, down, times = rows.tiles(*shape)
        assert across * shape[3] >= shape[1]
        assert down * times * shape[2] >= shape[0]
        assert max(down, times) <= 65535
    x = torch.randn(11, 9)
    monkeypatch.setattr(gpu, "_BLOCK", 16)
    expected = gpu.masked(x, 0.4, 7, None)
    monkeypatch.setattr(rows, "_MOST_PROGRAMS", 3)
    assert rows.tiles(11, 9, 1, 16) == (1, 3, 4)
    assert torch.equal(gpu.masked(x, 0.4, 7, None), expected)


def test_backward_masks_as_forward_did():
    x = torch.randn(50, 70, requires_grad=True)
    y = dropout(x, 0.3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.allclose(x.grad[x.grad != 0], torch.tensor(1 / 0.7))


def test_the_rate_is_kept():
    kept = (random_words(11, 400, 1000) >= op.threshold(0.25)).double().mean().item()
    # Six standard deviations of a mean of 400,000.
    assert abs(kept - 0.75) < 6 * np.sqrt(0.25 * 0.75 / 400_000)


def test_nothing_is_saved():
    saved = []
    x = torch.randn(8, 8, requires_grad=True)

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        dropout(x, 0.5)
    assert saved == []


def test_gradients_are_exact():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    state = torch.get_rng_state()

    def same_numbers(x):
        torch.set_rng_state(state)
        return dropout(x, 0.5)

    assert torch.autograd.gradcheck(same_numbers, (x,))
    assert torch.autograd.gradgradcheck(same_numbers, (x,))


def test_seeds_come_from_the_default_generator_or_as_provided():
    x = torch.ones(64)
    torch.manual_seed(3)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    numbers = torch.stack([torch.empty((), dtype=torch.int64).random_() for _ in range(2)])
    with seeds.provided(numbers):
        assert torch.equal(dropout(x, 0.5), first)
        assert torch.equal(dropout(x, 0.5), second)
        with pytest.raises(
            RuntimeError,
            match="random operations must be at most as many as the seeds provided for them, got "
            "more",
        ):
            dropout(x, 0.5)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_outside_is_refused(rate):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        dropout(torch.ones(2), rate)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_not_floating_is_refused(dtype):
    with pytest.raises(TypeError, match=f"x must be floating point, got {dtype}"):
        dropout(torch.ones(2, dtype=dtype), 0.5)


def test_no_rate_and_no_training_change_nothing():
    x = torch.ones(2)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x


def test_a_mask_is_made_where_it_is_used():
    # Were it made on the CPU, a GPU would have to wait for it. One of sizes only stands for it.
    x = torch.empty(3, 5, device="meta")
    with OnlyOn("meta"):
        assert op.keeps(x, 0.2, 5, None).shape == x.shape


def test_torch_accepts_the_operation():
    torch.library.opcheck(torch.ops.pykern.dropout.default, (torch.randn(3, 5), 0.2, 5, None))
    torch.library.opcheck(torch.ops.pykern.dropout.default, (torch.randn(5, 3).T, 0.2, 5, None))


class Counted(FakeTensorMode):
    """Counts the operations on tensors without values."""

    count = 0

    def __torch_dispatch__(self, *call, **kwargs):
        self.count += 1
        return super().__torch_dispatch__(*call, **kwargs)


def test_without_values_no_random_words_are_computed():
    """Half the time of an estimate was of them."""
    with Counted() as mode:
        x = torch.empty(3, 5)
        before = mode.count
        torch.ops.pykern.dropout(x, 0.2, 5, None)
    assert mode.count - before < 5


LAUNCHES = """
import torch
from pykern.kernels.gpu import dropout
for dtype in (torch.float32, torch.bfloat16):
    # One kernel for all of them, or a capture would have to load another.
    for seed, rate in ((1, 0.3), (16, 0.5), (2**40, 2.0**-32)):
        dropout.masked(torch.empty(64, 4096, dtype=dtype), rate, seed, None)
    for place in torch.arange(4).split(1):
        dropout.masked(torch.empty(64, 4096, dtype=dtype), 0.3, 0, place)
"""


@pytest.mark.slow
def test_sm90_budget():
    kernels = compiled_for_sm90(LAUNCHES)
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.spills == 0
        assert set(kernel.accesses("STG")) == {128}
        # A seed that may be in memory is a load of 64.
        assert set(kernel.accesses("LDG")) - {64} == {128}
        elements = 2048 // kernel.num_threads
        # 41 is what an H200 can hide behind its memory.
        assert kernel.num_instructions / elements < 24

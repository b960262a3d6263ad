"""Operations in inference mode, which torch hands over in other sizes, count as others do."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.boxes import load
from pykern.rehearse.operation_times import OperationTimes
from pykern.tensors.flops import CountedFlops


class Products(nn.Module):
    """Products within operations that are made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv1d(4, 4, 1)
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(self.conv(self.linear(x)))[0]
        z = torch.einsum("bij,bkj->bik", F.dropout(y), torch.matmul(x, x.mT) @ y)
        out: Tensor = F.scaled_dot_product_attention(z, z, z)
        return out


def called(mode: Any, counting: Any, cast: bool) -> Tensor:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(2, 4, 8)
    with mode(), torch.autocast("cpu", torch.bfloat16, enabled=cast), counting:
        return model(x)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more, torch runs products in other ways where their parts are called one by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cast", [False, True])
def test_products_in_inference_mode_are_counted(cast: bool) -> None:
    """Those within a linear layer, a convolution or an attention counted as 0."""
    counts = {mode: CountedFlops() for mode in (torch.no_grad, torch.inference_mode)}
    results = [called(mode, counted, cast) for mode, counted in counts.items()]
    totals = [counted.total for counted in counts.values()]
    assert totals[0] == totals[1] > 2 * 2 * 4 * 8 * 8
    assert torch.equal(*results)
    assert torch.equal(results[1], called(torch.inference_mode, torch.no_grad(), cast))


def test_times_in_inference_mode_are_those_of_the_parts() -> None:
    device = load("8xh100").devices[0]
    times = {mode: OperationTimes(device) for mode in (torch.no_grad, torch.inference_mode)}
    model, x = nn.Linear(512, 512), torch.randn(512, 512)
    for mode, counted in times.items():
        with mode(), counted:
            model(x)
    found, known = (times[mode].ns for mode in (torch.inference_mode, torch.no_grad))
    assert 0 < known == found

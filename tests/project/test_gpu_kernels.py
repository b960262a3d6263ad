"""The GPU session's kernels do the same as what they are compared with; nothing is timed here."""

from typing import cast

import pytest
import torch
from torch import Tensor

from bench.gpu import kernels

HOST = torch.device("cpu")
OPERATIONS = dict(kernels.operations(HOST, tokens=6, width=256, hidden=64))


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"dropout"}))
def test_an_operation_is_what_it_is_compared_with(name: str) -> None:
    operation = OPERATIONS[name]
    ours = kernels.results(operation.ours(*operation.arguments))
    plain = kernels.results(operation.plain(*operation.arguments))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    ours_back = kernels.both(operation, operation.ours)()
    plain_back = kernels.both(operation, operation.plain)()
    for one, other in zip(ours_back, plain_back, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    kernels.check(operation, operation.ours)


def test_a_contender_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "time_ms", lambda work: 1.0)
    plain = OPERATIONS["swiglu"]

    def wrong(packed: Tensor) -> Tensor:
        result = cast(Tensor, plain.ours(packed))
        # One column of 64, as where a kernel leaves the end of its rows.
        return torch.cat([result[:, :-1], result[:, -1:] * torch.nan], -1)

    def wrong_back(packed: Tensor) -> Tensor:
        return cast(Tensor, plain.ours(packed.detach() + 1.1 * (packed - packed.detach())))

    for ours in (wrong, wrong_back):
        monkeypatch.setattr(kernels, "contenders", lambda _, ours=ours: {"pykern": lambda: ours})
        found = kernels.measure(plain, copy_gbs=1.0)
        assert found["pykern"].startswith("ValueError: result ")


def test_traffic_is_what_goes_in_and_out() -> None:
    row, weight = 6 * 256 * 2, 256 * 2
    # x and weight in, normed out. Back: its gradient, both again, two out.
    expected = (row + weight) + row + row + (row + weight) + (row + weight)
    assert kernels.traffic_bytes(OPERATIONS["rms_norm"]) == expected
    # x, delta, weight in; sum and normed out. Back: both gradients, sum and weight, two out.
    expected = (2 * row + weight) + 2 * row + 2 * row + (row + weight) + (row + weight)
    assert kernels.traffic_bytes(OPERATIONS["add_rms_norm"]) == expected


def test_dropout_keeps_as_much_as_it_is_compared_with() -> None:
    operation = OPERATIONS["dropout"]
    assert kernels.results(operation.ours(*operation.arguments))[0].shape == (6, 256)
    assert kernels.traffic_bytes(operation) == 4 * 6 * 256 * 2

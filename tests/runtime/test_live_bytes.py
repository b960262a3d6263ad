from collections.abc import Callable

import pytest
import torch
from torch import nn

from pykern.budget.live_bytes import LiveBytes
from pykern.modes import as_before
from tests.interrupts import at_every_line


def test_bytes_are_counted_once_while_they_live() -> None:
    x = torch.zeros(100)
    live = LiveBytes()
    with live:
        y = x + 1
        assert live.now == 400
        z = y.view(10, 10)[:5]  # the same memory
        x.add_(1)
        x.t()
        assert live.now == 400
        del y
        assert live.now == 400
        del z
        assert live.now == 0
        assert live.peak == 400
        live.reset_peak()
        assert live.peak == 0


def test_what_a_backward_keeps_is_counted() -> None:
    layer = nn.Linear(8, 8)
    x = torch.zeros(4, 8)
    live = LiveBytes()
    with live:
        y = torch.tanh(layer(x)).sum()
        # tanh keeps its result; the sum is 4 bytes.
        assert live.now == 4 * 8 * 4 + 4
    y.backward()
    del y
    # Backward ran outside of it, and what was kept is gone.
    assert live.now == 0


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_finds_no_line_where_a_storage_ends() -> None:
    # Python drops an exception of a finalizer, and torch could end by SIGSEGV.
    def prepare() -> Callable[[], object]:
        x, live = torch.ones(2), LiveBytes()

        def act() -> None:
            with as_before(), live:
                for _ in range(2):
                    x.mul(2).add(1)

        return act

    assert at_every_line(prepare, lambda _: None) > 20

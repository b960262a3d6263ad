"""An interrupt anywhere in a call, or in its backward, leaves all as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pykern
from tests.interrupts import at_every_line


@pytest.mark.parametrize("recompute", [None, "stage"])
def test_the_next_call_is_right_after_an_interrupt_at_any_line(recompute: Any) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    parameters = list(layers.parameters())
    x = torch.ones(4, 3)
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=2, recompute=recompute) as pipe:

        def act() -> None:
            pipe(x).square().mean().backward()

        def gradients() -> list[torch.Tensor | None]:
            pipe.zero_grad()
            act()
            return [parameter.grad for parameter in parameters]

        expected = gradients()

        def prepare() -> Callable[[], object]:
            pipe.zero_grad()
            return act

        def check(where: str) -> None:
            assert all(map(lambda a, b: a is b, layers.parameters(), parameters)), where
            for found, right in zip(gradients(), expected, strict=True):
                assert found is not None, where
                assert right is not None
                assert torch.equal(found, right), where

        assert at_every_line(prepare, check, stride=2) > 100

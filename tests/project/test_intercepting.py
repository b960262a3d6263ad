"""Operations that draw are registered once, and given the generator of the interceptor."""

import pytest
import torch

from pykern import torch_private

WATCHED = """
import itertools
import torch
from pykern import torch_private
from tests.interrupts import Interrupt

for number in itertools.count():
    with Interrupt(min(number, 100) + number // 100 * 997) as interrupt:
        try:
            torch_private.watch_draws()
        except KeyboardInterrupt:
            pass
    if not interrupt.where:
        break
assert number > 60

class Draws(torch_private.Interceptor):
    asked = 0
    def draw(self, func, args, kwargs):
        self.asked += 1
        return func(*args, **kwargs)

with Draws() as draws:
    torch.rand(2) + torch.ones(2)
print(draws.asked)
"""


def test_interrupts_leave_no_operation_unwatched_or_watched_twice(python):
    """In a process of its own, which watches for the first time; torch warns of a second one."""
    assert python("-W", "error", "-c", WATCHED).stdout == "1\n"


class Refuses(torch_private.Interceptor):
    def draw(self, func, args, kwargs):
        raise ValueError(str(func))


def test_calls_that_take_a_generator_are_given_it_and_others_are_asked_for():
    torch_private.watch_draws()
    x = torch.ones(8)
    before = torch.default_generator.get_state()
    with Refuses() as interceptor:
        interceptor.generator = torch.Generator().manual_seed(3)
        drawn = x.clone().bernoulli_(0.5)
        with pytest.raises(ValueError, match=r"aten\.bernoulli_\.float"):
            x.clone().bernoulli_(0.5, generator=torch.Generator())
    assert torch.equal(before, torch.default_generator.get_state())
    expected = x.clone().bernoulli_(0.5, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn, expected)

"""Operations that draw are registered once, whenever an interrupt comes."""

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

"""Attributes computed once."""

import threading
from dataclasses import dataclass

from pykern.once import once


@dataclass(frozen=True)
class Asked:
    calls: list[int]

    @once
    def number(self) -> int:
        """A number."""
        self.calls.append(1)
        return len(self.calls)


def test_it_is_computed_once_for_each_object() -> None:
    asked, other = Asked([]), Asked([1])
    assert (asked.number, asked.number, other.number, asked.calls) == (1, 1, 2, [1])
    assert Asked.number.__doc__ == "A number."


def test_nothing_is_locked_while_it_is_computed() -> None:
    """A lock would stay locked in a forked child."""
    begun, end = threading.Event(), threading.Event()

    class Waits:
        @once
        def value(self) -> int:
            begun.set()
            end.wait(timeout=10)
            return 1

    first, second = Waits(), Waits()
    thread = threading.Thread(target=lambda: first.value)
    thread.start()
    assert begun.wait(timeout=10)
    got: list[int] = []
    asker = threading.Thread(target=lambda: got.append(second.value))
    begun.clear()
    asker.start()
    assert begun.wait(timeout=10), "the second waits for the first"
    end.set()
    thread.join()
    asker.join()
    assert got == [1]

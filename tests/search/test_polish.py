import math
import os
import signal
import threading
import time

import pytest

from pykern.plan import Costs, Kind, check, peak_bytes, simulate
from pykern.search import auto

pytest.importorskip("ortools")

from pykern.search.polish import polish


def test_a_small_plan_becomes_optimal():
    found = auto(3, 3, memory=0.67, budget_ms=0, max_chunks=1)
    better = polish(found, seconds=10)
    check(better.plan)
    assert better.makespan_ns < found.makespan_ns
    assert better.bound_ns <= better.makespan_ns
    assert max(peak_bytes(better.plan, better.memory)) <= 0.67 * 3
    assert simulate(better.plan, better.costs).makespan_ns == better.makespan_ns


def test_costs_of_a_split_latency_and_what_is_kept_are_counted():
    costs = Costs(1, 2, 0.1, input_ns=1.2, weight_ns=1.3, overhead_ns=0.1, device_speeds=[1, 2, 1])
    found = auto(3, 4, costs=costs, memory=0.75, kept=0.5, budget_ms=0, max_chunks=2)
    better = polish(found, seconds=2)
    check(better.plan)
    assert better.makespan_ns <= found.makespan_ns
    assert max(peak_bytes(better.plan, better.memory)) <= 0.75 * 3 * (1 + 1e-6)


def test_a_time_is_needed():
    with pytest.raises(ValueError, match="seconds must be above 0, got 0"):
        polish(auto(2, 2, budget_ms=0), seconds=0)


def test_an_interrupt_ends_it_and_reaches_the_caller():
    found = auto(4, 8, memory=0.5, budget_ms=100)
    handler = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        polish(found, seconds=50)
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGINT) is handler
    # The solver's own handler would have taken this one's place below Python, and end the process.
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_halves_that_are_not_known_stay_out():
    costs = Costs([3.0, 4.0], [5.0, 4.0], 0.5, input_ns=math.nan, weight_ns=[math.nan, 1.0])
    found = auto(2, 4, costs=costs, budget_ms=0)
    better = polish(found, 2)
    assert not better.plan.has(Kind.I)
    assert better.makespan_ns <= found.makespan_ns
    assert better.makespan_ns == simulate(better.plan, costs).makespan_ns

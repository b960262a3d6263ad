"""Steps on a driver that does nothing, timed in a process of their own: python steps.py LIBRARY."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from pykern import _C, schedules
from pykern.plan import Kind, Plan, lower

# Any address: nothing is moved.
TRANSFER = (64, 128, 256, 0)


def program_of(plan: Plan) -> _C.StreamProgram:
    """Every action with a graph, every copy with something to move."""
    lanes = _C.Lanes([(device, 0, 1) for device in range(plan.num_devices)])
    program = _C.StreamProgram(plan, lanes)
    for row in plan.rows:
        for action in row:
            program.set_launch(action, 1, 1, [], [])
    for lane in lower(plan).lanes:
        for copy in lane.copies:
            program.set_transfers(copy.action, [TRANSFER])
    return program


def main(library: str, num_microbatches: int, rounds: int) -> None:
    """Prints the milliseconds of each round by way of issuing, and what a step consists of."""
    _C.use_cuda_driver(library)
    plan = schedules.one_f_one_b(8, num_microbatches)
    program = program_of(plan)
    executor = _C.StreamExecutor()
    callers = dict.fromkeys(range(8), 0)
    callbacks = {kind: [lambda _: [TRANSFER]] * plan.num_stages for kind in (Kind.F, Kind.B)}

    def replayed() -> None:
        executor.run(program, {}, callers, replay=True, traced=False)

    def called() -> None:
        executor.run(program, callbacks, callers, replay=False, traced=False)

    ways: dict[str, Callable[[], None]] = {
        "called": called,
        "replayed": replayed,
        "whole step": lambda: executor.run_whole(program, callers),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with executor.claim():
        for _ in range(rounds + 3):
            for name, step in ways.items():
                start = time.perf_counter_ns()
                step()
                samples[name].append((time.perf_counter_ns() - start) / 1e6)
    kept = {name: times[3:] for name, times in samples.items()}
    print(json.dumps({"samples": kept, "num_actions": plan.num_actions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

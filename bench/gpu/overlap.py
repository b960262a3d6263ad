"""Whether streams run at once, and pipelines of spinning kernels against the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pykern.plan import Action, Costs, Kind, Plan, simulate
from pykern.schedules import gpipe, hanayo, interleaved, one_f_one_b

from .frame import ROOT, Json
from .groups import split
from .tools import elapsed_ms, own_stream

NUM_STREAMS = 4
NUM_SPINS = 20
CYCLES = 2_000_000  # about a millisecond
ASK = "import json; from bench.gpu import overlap; print(json.dumps(overlap.measure()))"

Streams = Sequence[torch.cuda.Stream]


def run(folder: Path) -> Json:
    """The driver reads the number of connections once, so each has a process of its own."""
    return {f"{connections} connections": in_process(connections) for connections in (8, 32)}


def control() -> bool:
    """Four streams that are one."""
    stream = own_stream()
    spin(stream, CYCLES)
    return NUM_STREAMS * spins_ms([stream]) < 1.5 * spins_ms([stream] * NUM_STREAMS)


def in_process(connections: int) -> Json:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    figures: Json = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure() -> Json:
    groups = split(NUM_STREAMS, 32)
    return {
        "groups": figures([group.stream() for group in groups]),
        "plain streams": figures([own_stream() for _ in range(NUM_STREAMS)]),
    }


def figures(streams: Streams) -> Json:
    for stream in streams:
        spin(stream, CYCLES)
    alone_ms = spins_ms(streams[:1])
    unit_ms = alone_ms / NUM_SPINS
    num = NUM_STREAMS
    plans = {
        "gpipe": gpipe(num, 8),
        "1f1b": one_f_one_b(num, 8),
        "interleaved": interleaved(num, 8, 2),
        "hanayo W=1": hanayo(num, 8, 1),
        "hanayo W=2": hanayo(num, 8, 2),
    }
    return {
        "unit_ms": unit_ms,
        "at_once": num * alone_ms / spins_ms(streams),
        "measured_by_simulated": {
            name: measured_ms(plan, streams) / predicted_ms(plan, unit_ms)
            for name, plan in plans.items()
        },
    }


def spin(stream: torch.cuda.Stream, cycles: int) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def spins_ms(streams: Streams) -> float:
    return elapsed_ms(lambda: spins(streams), streams)


def spins(streams: Streams) -> None:
    for _ in range(NUM_SPINS):
        for stream in streams:
            spin(stream, CYCLES)


def costs(unit_ns: float) -> Costs:
    """F takes a unit, B two."""
    return Costs(forward_ns=unit_ns, backward_ns=2 * unit_ns)


def predicted_ms(plan: Plan, unit_ms: float) -> float:
    return simulate(plan, costs(unit_ms * 1e6)).makespan_ns / 1e6


def measured_ms(plan: Plan, streams: Streams) -> float:
    """The least of three, since anything else on the machine only adds."""
    return min(elapsed_ms(lambda: issue(plan, streams), streams) for _ in range(3))


def issue(plan: Plan, streams: Streams) -> None:
    """Every action on its device's stream, behind what it waits for."""
    done: dict[Action, torch.cuda.Event] = {}
    for device, action in in_order(plan):
        for needed in inputs(action, plan.num_stages):
            streams[device].wait_event(done[needed])
        spin(streams[device], CYCLES if action.kind is Kind.F else 2 * CYCLES)
        done[action] = streams[device].record_event()


def in_order(plan: Plan) -> list[tuple[int, Action]]:
    """Devices and actions as they begin in the simulator, where all inputs come first."""
    rows = simulate(plan, costs(1)).rows
    begun = [(span.start_ns, device, span) for device, row in enumerate(rows) for span in row]
    begun.sort(key=lambda entry: entry[:2])
    return [(device, span.action) for _, device, span in begun]


def inputs(action: Action, num_stages: int) -> list[Action]:
    """Inputs that F and B wait for, besides the action before them on their device."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)] if stage > 0 else []
    own = [Action(Kind.F, stage, microbatch)]
    return own + ([Action(Kind.B, stage + 1, microbatch)] if stage + 1 < num_stages else [])

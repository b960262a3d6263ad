"""Steps with a planted cause, made by simulation: nothing runs."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from pykern.plan import Costs, Kind, Plan, Span, Timeline, simulate
from pykern.plan.costs import changed
from pykern.profiling import Observed
from pykern.schedules import by_name, one_f_one_b

MS = 1e6
DEVICES = 4
LAYERS_OF_STAGE = 4


def make_plan(name: str | None, microbatches: int) -> Plan:
    return by_name[name or "one_f_one_b"](DEVICES, microbatches)


def costs_of(times: Sequence[float], copies: Sequence[float] = (0.0,) * DEVICES) -> Costs:
    """F takes these times, B twice as long, a copy over the boundary behind a stage `copies`."""
    alone = Costs(list(times), [2 * ns for ns in times])
    return changed(alone, message_bytes=list(copies), bandwidth=1.0, shared_links=True)


def step(
    times: Sequence[float],
    microbatches: int = 16,
    copies: Sequence[float] = (0.0,) * DEVICES,
    **more: Any,
) -> Observed:
    """A step of stages that take these times for F, exactly as simulated."""
    plan, costs = one_f_one_b(DEVICES, microbatches), costs_of(times, copies)
    size = LAYERS_OF_STAGE
    values: dict[str, Any] = {
        "timeline": simulate(plan, costs),
        "step_ns": simulate(plan, costs).makespan_ns,
        "rows": 64,
        "spans": [range(size * stage, size * (stage + 1)) for stage in range(DEVICES)],
        "layer_ns": [3 * ns / size for ns in times for _ in range(size)],
        "num_cores": DEVICES,
    }
    return Observed(plan=plan, costs=costs, make_plan=make_plan, **(values | more))


def imbalance(random: Random) -> Observed:
    """One stage has far more work."""
    times = [MS] * DEVICES
    times[random.randrange(DEVICES)] *= random.uniform(2, 5)
    return step(times)


def few_microbatches(random: Random) -> Observed:
    """As many microbatches as stages, or fewer."""
    return step([MS * random.uniform(1, 1.1) for _ in range(DEVICES)], random.randint(1, DEVICES))


def slow_device(random: Random) -> Observed:
    """One device takes longer for layers that take as long as those of the others alone."""
    times = [MS] * DEVICES
    alone = [3 * MS / LAYERS_OF_STAGE] * (DEVICES * LAYERS_OF_STAGE)
    times[random.randrange(DEVICES)] *= random.uniform(2, 5)
    return step(times, layer_ns=alone)


def short_actions(random: Random) -> Observed:
    """Most of an action is not its layers."""
    times = [20_000 * random.uniform(1, 1.1) for _ in range(DEVICES)]
    beside = {Kind.F: 16_000.0, Kind.B: 32_000.0}
    return step(times, layer_ns=[1000.0] * DEVICES * LAYERS_OF_STAGE, action_ns=beside)


def competing_threads(random: Random) -> Observed:
    """With one torch thread everything is faster."""
    slower = random.uniform(1.6, 3)
    plan, alone = one_f_one_b(DEVICES, 16), costs_of([MS] * DEVICES)
    return step(
        [slower * MS] * DEVICES,
        one_thread=simulate(plan, alone),
        one_thread_costs=alone,
        torch_threads=8,
    )


def shared_cores(random: Random) -> Observed:
    """Two cores for four workers."""
    return step([MS] * DEVICES, num_cores=2, core_share=random.uniform(0.5, 0.7))


def late_starts(random: Random) -> Observed:
    """Each action of a device begins later than it could."""
    plan = one_f_one_b(DEVICES, 16)
    late = simulate(plan, Costs(2 * MS, 3 * MS))
    by = random.uniform(0.8, 0.99)
    rows = [[Span(s.action, s.start_ns + by * MS, s.end_ns) for s in row] for row in late.rows]
    return step([MS] * DEVICES, timeline=Timeline(rows))


def slow_link(random: Random) -> Observed:
    """Copies over one boundary take longer than the stages."""
    copies = [0.01 * MS] * (DEVICES - 1) + [0.0]
    copies[random.randrange(DEVICES - 1)] = random.uniform(3, 8) * MS
    return step([MS] * DEVICES, copies=copies, num_cores=None, layer_ns=())


def host_synchronisation(random: Random) -> Observed:
    """A layer's `.item()` keeps the host from issuing what could begin on other GPUs."""
    of = late_starts(random)
    waits = {"num_cores": None, "host_waits": ["model.py:12"]}
    return replace(of, layer_ns=(), **waits)  # type: ignore[arg-type]


PLANTED = {
    "imbalance of stages": imbalance,
    "warm-up and cool-down": few_microbatches,
    "slow device": slow_device,
    "short actions": short_actions,
    "competing threads": competing_threads,
    "shared cores": shared_cores,
    "late starts": late_starts,
    "waiting for a copy": slow_link,
    "host synchronisation": host_synchronisation,
}

"""Steps whose durations vary: against the simulator, the distribution, and bounds."""

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pykern.plan import Costs, Kind, Plan, simulate, with_reductions
from pykern.scale.jitter import Jitter, jitter
from pykern.schedules import by_name

ONE_COPY = sorted(set(by_name) - {"chimera"})


def costs(plan: Plan, *, shared_links: bool = True) -> Costs:
    """Nothing is equal, and messages take long."""
    stages = range(plan.num_stages)
    return Costs(
        [10.0 + stage for stage in stages],
        [23.0 + 2 * stage for stage in stages],
        1.5,
        input_ns=[11.0 + stage for stage in stages],
        weight_ns=[12.0 + stage for stage in stages],
        update_ns=3.0,
        reduce_ns=5.0,
        overhead_ns=0.5,
        message_bytes=[30.0 + 7 * stage for stage in stages],
        bandwidth=2.0,
        shared_links=shared_links,
        overlap=0.3,
        device_speeds=[1.0 + device / 8 for device in range(plan.num_devices)],
    )


@pytest.mark.parametrize("shared_links", [False, True])
@pytest.mark.parametrize("name", ONE_COPY)
def test_without_jitter_all_steps_are_the_simulators(name: str, shared_links: bool) -> None:
    plan = by_name[name](4, 8)
    if not plan.has(Kind.U):
        plan = with_reductions(plan, over_peers=True)
    given = costs(plan, shared_links=shared_links)
    makespan_ns = simulate(plan, given).makespan_ns
    found = jitter(plan, given, 0.0, num_steps=3)
    assert found.even_ns == makespan_ns
    assert found.steps_ns == pytest.approx([makespan_ns] * 3, rel=1e-12)
    # Draws that hardly differ from 1 change hardly anything.
    close = jitter(plan, given, 1e-9, num_steps=3)
    assert close.steps_ns == pytest.approx([makespan_ns] * 3, rel=1e-6)


@pytest.mark.parametrize("variation", [0.1, 0.5, 2.0])
def test_an_action_alone_varies_as_told(variation: float) -> None:
    found = jitter(by_name["forward_only"](1, 1), Costs(100.0, 200.0), variation, 20_000)
    assert found.even_ns == 100
    assert found.mean_ns == pytest.approx(100, rel=4 * variation / math.sqrt(20_000))
    assert statistics.pstdev(found.steps_ns) == pytest.approx(100 * variation, rel=0.05)
    late = sum(step > found.percentile_95_ns for step in found.steps_ns)
    assert late == 1000


def test_devices_that_wait_for_each_other_lose_and_more_of_them_more() -> None:
    for name in ("one_f_one_b", "zb_h1"):
        lost = []
        for num_devices in (1, 2, 4, 8):
            found = jitter(by_name[name](num_devices, 16), Costs(100.0, 200.0), 0.3)
            lost.append(found.mean_ns / found.even_ns - 1)
            assert found.steps_ns[0] < found.mean_ns < found.percentile_95_ns
        assert lost[0] == pytest.approx(0, abs=0.01)
        assert lost == sorted(lost)
        assert lost[1] > 0.02


@pytest.mark.parametrize("variation", [0.1, 0.5])
def test_a_step_is_the_longest_of_independent_pipelines(variation: float) -> None:
    plan, num_steps = by_name["forward_only"](1, 1), 20_000
    random = np.random.default_rng(7)
    for pipelines in (2, 16):
        found = jitter(plan, Costs(100.0, 200.0), variation, num_steps, pipelines=pipelines)
        sizes = num_steps, pipelines
        expected = 100 * random.gamma(variation**-2, variation**2, sizes).max(axis=1)
        error = 5 * expected.std() / math.sqrt(num_steps / 2)
        assert found.mean_ns == pytest.approx(expected.mean(), abs=error)
        late = np.percentile(expected, 95)
        assert found.percentile_95_ns == pytest.approx(late, rel=0.1 * variation)
        # The others of its group wait for the slowest.
        (wait,) = found.waits_ns
        assert wait == pytest.approx(expected.mean() - 100, abs=2 * error)


def test_one_pipeline_waits_for_nobody_and_more_of_them_wait_longer() -> None:
    plan = with_reductions(by_name["one_f_one_b"](4, 8), over_peers=True)
    given = costs(plan)
    one = jitter(plan, given, 0.2, 500)
    assert one == jitter(plan, given, 0.2, 500, pipelines=1)
    assert one.waits_ns == (0, 0, 0, 0)
    several = [one, *(jitter(plan, given, 0.2, 500, pipelines=many) for many in (2, 8, 64))]
    means = [found.mean_ns for found in several]
    assert means == sorted(set(means))
    for few, many in pairwise(several):
        assert all(a < b for a, b in zip(few.waits_ns, many.waits_ns, strict=True))
    assert {found.even_ns for found in several} == {one.even_ns}
    even = jitter(plan, given, 0.0, 3, pipelines=5)
    assert even.steps_ns == pytest.approx([one.even_ns] * 3, rel=1e-12)
    assert even.waits_ns == (0, 0, 0, 0)


def test_each_device_waits_for_its_own_group() -> None:
    # The second device varies alone: the first one has nothing to do.
    plan = by_name["forward_only"](2, 1)
    found = jitter(plan, Costs([0.0, 100.0], [0.0, 200.0]), 0.3, 5000, pipelines=4)
    assert found.waits_ns[0] == 0
    assert found.waits_ns[1] == pytest.approx(found.mean_ns - 100, rel=0.1)


def test_a_seed_gives_the_same_steps() -> None:
    plan = by_name["interleaved"](4, 8)
    found = [jitter(plan, costs(plan), 0.2, 50, seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert list(found[0].steps_ns) == sorted(found[0].steps_ns)


def test_percentiles_are_of_what_was_simulated() -> None:
    steps = Jitter(1.0, tuple(float(step) for step in range(1, 101)), (0.0,))
    assert (steps.mean_ns, steps.percentile_95_ns) == (50.5, 95)
    assert replace(steps, steps_ns=(7.0,)).percentile_95_ns == 7


@pytest.mark.parametrize("variation", [-0.1, math.nan, 11.0])
def test_variations_out_of_range_are_refused(variation: float) -> None:
    with pytest.raises(ValueError, match=f"variation must be 0 to 10, got {variation}. "):
        jitter(by_name["gpipe"](2, 2), Costs(1.0, 2.0), variation)


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan must have one copy of the model, got 2\. "):
        jitter(by_name["chimera"](4, 4), Costs(1.0, 2.0), 0.1)
    with pytest.raises(ValueError, match="pipelines must be 1 to 16777216, got 0"):
        jitter(by_name["gpipe"](2, 2), Costs(1.0, 2.0), 0.1, pipelines=0)
    with pytest.raises(ValueError, match="num_steps must be 1 to 16777216, got 0"):
        jitter(by_name["gpipe"](2, 2), Costs(1.0, 2.0), 0.1, 0)

"""The cost of a slow GPU, against sums by hand and bounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from pykern.scale import DGX_H100, Job, Layout, Straggler, Transformer, predict, straggler

WRONG = cast(Any, "x")
JOB = Job(Transformer(num_layers=8, width=512, sequence=128, vocabulary=1000), batch=64)


def cost(layout: Layout, slowdown: float, schedule: str = "one_f_one_b") -> Straggler:
    return straggler(JOB, DGX_H100, layout, schedule, slowdown)


def test_a_gpu_alone_takes_so_much_longer_for_its_products() -> None:
    alone = predict(JOB, DGX_H100, Layout(1, 1, 1), "gpipe")
    found = cost(Layout(1, 1, 1), 1.5, "gpipe")
    assert found.even_ns == alone.step_ns
    assert found.steps_ns == pytest.approx([alone.step_ns + 0.5 * alone.makespan_ns])
    assert found.worst == found.mean


def test_shards_and_pipelines_wait_but_their_sums_are_as_fast() -> None:
    layout = Layout(4, 2, 1)
    even = predict(JOB, DGX_H100, layout, "gpipe")
    (slowed,) = cost(layout, 2.0, "gpipe").steps_ns
    products_ns = even.makespan_ns - even.tensor_ns
    assert slowed == pytest.approx(even.step_ns + products_ns, rel=0.02)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1", "hanayo"])
def test_a_slower_gpu_costs_more_and_never_more_than_its_factor(schedule: str) -> None:
    layout = Layout(2, 1, 4)
    costs = [cost(layout, factor, schedule) for factor in (1.0, 1.1, 1.5, 3.0)]
    assert costs[0].worst == costs[0].mean == 0
    worst = [each.worst for each in costs]
    assert worst == sorted(worst)
    assert len(costs[1].steps_ns) == 4
    for each, factor in zip(costs[1:], (1.1, 1.5, 3.0), strict=True):
        assert 0 < each.mean <= each.worst < factor - 1


@pytest.mark.parametrize("slowdown", [0.5, 0.0, -1.0, math.inf, math.nan])
def test_a_factor_below_1_is_refused(slowdown: float) -> None:
    with pytest.raises(ValueError, match="slowdown must be 1 or more, got"):
        cost(Layout(1, 1, 2), slowdown)


@pytest.mark.parametrize(
    ("slowdowns", "message"),
    [
        ([1.0], "slowdowns must hold one for each of the 2 devices of a pipeline, got 1"),
        ([1.0, 0.9], r"slowdown must be 1 or more, got 0\.9"),
    ],
)
def test_each_device_has_a_factor(slowdowns: Sequence[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(JOB, DGX_H100, Layout(1, 1, 2), "gpipe", slowdowns)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Job(WRONG, 1), "model must be a Transformer, got 'x'"),
        (lambda: replace(JOB, overlap_sums=WRONG), "overlap_sums must be True or False, got 'x'"),
        (lambda: predict(JOB, DGX_H100, WRONG, "gpipe"), "layout must be a Layout, got 'x'"),
        (lambda: predict(JOB, WRONG, Layout(1, 1, 1), "gpipe"), "cluster must be a Cluster, got"),
        (lambda: predict(JOB, DGX_H100, Layout(1, 1, 1), "gpipe", WRONG), "slowdowns must be a li"),
        (
            lambda: straggler(JOB, DGX_H100, Layout(1, 1, 1), "gpipe", WRONG),
            "slowdown must be a number, got 'x'",
        ),
    ],
)
def test_wrong_types_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()

"""The search, for measurements that are made up."""

import itertools
from math import inf, isfinite

import pytest

from pykern.partition.unequal import neighbours
from pykern.plan.shares import Shares
from pykern.schedules import chimera, gpipe
from pykern.tuning.measurements import Measurements
from pykern.tuning.search import ProposalSearch
from pykern.tuning.space import balanced_spans, shares_of

from .synthetic import measurements

UNEVEN = [10.0, 10.0, 10.0, 10.0, 40.0, 10.0, 80.0]


def ignore(_: float) -> None:
    pass


def searched(
    measured: Measurements, memory: float | None = None, devices: int = 2, rows: int = 8
) -> ProposalSearch:
    search = ProposalSearch(measured, devices, rows, memory)
    search.run(ignore)
    return search


def test_the_same_measurements_give_the_same_candidates() -> None:
    assert searched(measurements(UNEVEN)).best == searched(measurements(UNEVEN)).best


def test_candidates_are_sorted_and_differ() -> None:
    best = searched(measurements(UNEVEN, replica_ns=1e6)).best
    times = [one.predicted_ns for one in best]
    assert times == sorted(times)
    pairs = itertools.combinations(best, 2)
    assert all((a.plan, a.spans) != (b.plan, b.spans) for a, b in pairs)


def test_stages_have_equal_times_where_replicas_are_dear() -> None:
    best = searched(measurements(UNEVEN, replica_ns=1e6)).best[0]
    assert best.replicas == 1
    # By number of units the second device would have 130 of 170.
    busy = [0.0, 0.0]
    for stage, span in enumerate(best.spans):
        busy[best.plan.placement.device_of(stage)] += sum(UNEVEN[unit] for unit in span)
    assert max(busy) <= 90.0


def test_replicas_win_where_they_cost_nothing() -> None:
    found = searched(measurements(UNEVEN, reduce_ns=(0.0,) * 7)).best[0]
    assert found.replicas == 2
    assert found.predicted_ns == pytest.approx(8 * 3 * sum(UNEVEN) / 2)


def test_no_plan_is_below_the_bound() -> None:
    search = searched(measurements(UNEVEN, step_ns=7.0, handover_ns=(5.0, 5.0)))
    for one in search.best:
        shares = Shares(2, one.microbatches, one.replicas)
        assert one.predicted_ns >= search.bound_ns(shares) - 1e-6


def test_nor_where_replicas_have_unequal_numbers_of_microbatches_and_share_cores() -> None:
    fixed = {kind: (tuple(50.0 for _ in UNEVEN),) * 2 for kind in "FBIW"}
    measured = measurements(UNEVEN, times_ns=fixed, reduce_ns=(0.0,) * len(UNEVEN))
    search, shares = ProposalSearch(measured, 3, 7), Shares(3, 4, 3)
    costs = measured.costs([range(len(UNEVEN))], 7 / 4)
    timeline = search.predict(shares.side_by_side(gpipe(1, 2)), costs, 7 / 4)
    assert timeline.makespan_ns >= search.bound_ns(shares)


def test_a_schedule_of_two_replicas_pays_for_the_second() -> None:
    """Chimera has a replica of each stage of its own, beside those of `replicas`."""
    free, dear = (measurements(UNEVEN, replica_ns=of) for of in (0.0, 1e6))
    spans, rows = balanced_spans(free, 2, 4), 4
    plan = chimera(2, 2)
    found = [ProposalSearch(of, 2, 8)._proposal("chimera", plan, spans, 1) for of in (free, dear)]
    one, other = (proposal.predicted_ns for proposal in found if proposal is not None)
    assert other - one == 1e6
    assert rows * plan.num_microbatches == 8


@pytest.mark.parametrize("devices", [2, 4])
def test_a_model_that_cannot_have_replicas_gets_no_plan_with_any(devices: int) -> None:
    """Chimera's neither."""
    best = searched(measurements(UNEVEN, replica_ns=inf), devices=devices, rows=16).best
    assert {one.plan.placement.num_replicas for one in best} == {1}
    assert all(isfinite(one.predicted_ns) for one in best)


def test_nor_are_replicas_the_remedy_for_too_many_devices() -> None:
    with pytest.raises(ValueError, match=r"devices must be at most 3, .* Use fewer devices"):
        searched(measurements([10.0] * 3, replica_ns=inf), devices=4)


def test_what_is_pruned_is_not_better(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every action adds so much that many microbatches are hopeless.
    measured = measurements(
        UNEVEN,
        times_ns={
            kind: tuple(tuple(1000.0 + time * rows for time in UNEVEN) for rows in (1, 4))
            for kind in "FBIW"
        },
    )
    pruned = searched(measured)
    assert pruned.num_pruned > 0
    monkeypatch.setattr(ProposalSearch, "bound_ns", lambda *_: 0.0)
    every = searched(measured)
    assert every.num_pruned == 0
    assert every.best[0] == pruned.best[0]


def test_memory_is_kept_by_recomputing() -> None:
    measured = measurements([10.0] * 6, replica_ns=1e6)
    free = searched(measured, rows=4)
    most = max(max(one.peak_bytes) for one in free.best)
    least = 6 * 1000 / 2 + 600.0
    assert least < most
    found = searched(measured, memory=least, rows=4)
    assert all(max(one.peak_bytes) <= least for one in found.best)
    assert found.best[0].predicted_ns > free.best[0].predicted_ns
    assert any(one.levels is not None for one in found.best)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory must be enough for some plan, got 100"):
        searched(measurements(UNEVEN), memory=100)


def test_too_many_devices_are_refused() -> None:
    search = ProposalSearch(measurements(UNEVEN), 16, 8, replicated=False)
    with pytest.raises(ValueError, match="devices must be at most 7"):
        search.run(ignore)


def test_devices_that_share_cores_gain_nothing_from_being_more() -> None:
    shared = searched(measurements([10.0] * 8, cores=2), devices=4)
    work = 8 * 3 * 80.0
    assert shared.best[0].predicted_ns >= work / 2 - 1e-6


def test_finalists_are_of_different_kinds() -> None:
    search = searched(measurements(UNEVEN))
    kinds = [one.kind for one in search.finalists(4)]
    assert len(set(kinds)) == 4
    # Half of them differ in more than their schedule.
    assert len({kind[1:] for kind in kinds}) >= 2
    assert search.best[0] in search.finalists(4)


def test_microbatches_are_divisors_and_powers() -> None:
    counts = {shares.num_microbatches for shares in shares_of(2, 12, replicated=False)}
    assert counts == {1, 2, 3, 4, 6, 8, 12}


def test_neighbours_leave_no_stage_empty() -> None:
    spans = balanced_spans(measurements([1.0, 1.0, 1.0]), 2, 1)
    assert [tuple(map(len, near)) for near in neighbours(spans)] in ([(2, 1)], [(1, 2)])

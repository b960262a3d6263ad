"""The numbers of a timeline, and the spans that it refuses."""

import pickle

import pytest

from pykern.plan import Action, Costs, Kind, Placement, Span, Timeline, by_slots, simulate


def span(text: str, start_ns: float, end_ns: float) -> Span:
    return Span(Action.parse(text), start_ns, end_ns)


def test_measures_of_a_small_one() -> None:
    timeline = Timeline(
        [
            [span("0F0", 100, 110), span("0F1", 110, 120), span("0B0", 140, 160)],
            [span("1F0", 110, 120), span("1B0", 120, 140)],
        ]
    )
    assert timeline.num_devices == 2
    assert timeline.makespan_ns == 60
    assert [timeline.busy_ns(device) for device in range(2)] == [40, 30]
    assert timeline.bubble_ratio == 1 - 70 / 120
    assert [timeline.peak_in_flight(device) for device in range(2)] == [2, 1]
    assert timeline.rows[1][0] == span("1F0", 110, 120)


def test_spans_of_a_kind_are_those_of_the_rows() -> None:
    timeline = simulate(by_slots(Placement.linear(2), 3, group=1, group_offset=2), Costs(1, 2))
    for kind in (Kind.F, Kind.B, Kind.REDUCE):
        rows = [[span for span in row if span.action.kind is kind] for row in timeline.rows]
        assert timeline.spans_of(kind) == rows


def test_the_span_is_of_the_longest_device_alone() -> None:
    timeline = Timeline(
        [
            [span("0F0", 0, 10), span("0B0", 30, 40)],
            [span("1F0", 10, 20), span("1B0", 20, 70)],
            [],
        ]
    )
    assert (timeline.makespan_ns, timeline.span_ns) == (70, 60)
    assert timeline.bubble_ratio == 1 - 80 / (3 * 70)
    assert timeline.span_bubble_ratio == 1 - 80 / (3 * 60)


def test_actions_side_by_side_are_busy_once() -> None:
    timeline = Timeline([[span("0F1", 0, 10), span("0B0", 0, 6), span("0F2", 8, 14)]])
    assert (timeline.busy_ns(0), timeline.makespan_ns, timeline.span_ns) == (14, 14, 14)


def test_equality_and_pickle() -> None:
    timeline = Timeline([[span("0F0", 100, 110)], [span("1F0.1", 110, 120.5)]])
    assert pickle.loads(pickle.dumps(timeline)) == timeline
    assert pickle.loads(pickle.dumps(timeline.rows[1][0])) == span("1F0.1", 110, 120.5)
    assert timeline != Timeline([[span("0F0", 100, 110)], []])


def test_nothing_ran() -> None:
    timeline = Timeline([[], []])
    assert (timeline.span_ns, timeline.span_bubble_ratio) == (0, 0)
    assert (timeline.makespan_ns, timeline.bubble_ratio, timeline.busy_ns(1)) == (0, 0, 0)
    assert timeline.peak_in_flight(0) == 0


def test_a_simulated_one_can_be_made_again_from_its_rows() -> None:
    plan = by_slots(Placement.wave(2, 1), 4, group=2, group_offset=8)
    predicted = simulate(plan, Costs(0.1, 0.2))
    again = Timeline(predicted.rows)
    assert again.rows == predicted.rows
    assert again.makespan_ns == predicted.makespan_ns


def test_a_busy_device_has_no_bubble_whatever_the_rounding() -> None:
    row = [span(f"0F{i}", i * 0.1, (i + 1) * 0.1) for i in range(1000)]
    assert 0 <= Timeline([row]).bubble_ratio < 1e-12


@pytest.mark.parametrize(
    "row",
    [
        [span("0F0", 2, 1)],
        [span("0F0", 5, 6), span("0F1", 4, 7)],
        [span("0F0", float("nan"), 1)],
        [span("0F0", 0, float("inf"))],
    ],
)
def test_spans_out_of_order_are_refused(row: list[Span]) -> None:
    with pytest.raises(ValueError, match=r"times must be finite, .* for 0F. on device 1"):
        Timeline([[], row])


@pytest.mark.parametrize("device", [-1, 2])
def test_a_device_that_is_not_there_has_no_figures(device: int) -> None:
    timeline = Timeline([[], []])
    with pytest.raises(IndexError, match="device must be 0 to 1"):
        timeline.busy_ns(device)
    with pytest.raises(IndexError, match="device must be 0 to 1"):
        timeline.peak_in_flight(device)

"""Chrome traces count what devices hold."""

import json
from pathlib import Path

import pytest

from pykern.plan import Action, Costs, Kind, Plan, Timeline, simulate
from pykern.plan.drawing import save_chrome_trace
from pykern.schedules import forward_only, one_f_one_b, zb_h1

HELD = {Kind.F: 100.0, Kind.B: -100.0, Kind.I: -40.0, Kind.W: -60.0}


def counters_of(
    timeline: Timeline, path: Path, held: dict[Action, float] | None = None
) -> dict[str, list[float]]:
    save_chrome_trace({"measured": timeline}, path, held)
    counted: dict[str, list[float]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "C":
            counted.setdefault(event["name"], []).extend(event["args"].values())
    return counted


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_microbatches_in_flight_and_bytes_are_counted(make, tmp_path: Path) -> None:
    plan = make(3, 5)
    timeline = simulate(plan, Costs(1e6, 2e6))
    held = {action: HELD[action.kind] for row in plan.rows for action in row}
    counted = counters_of(timeline, tmp_path / "trace.json", held)
    assert len(counted) == 2 * 3
    for device in range(3):
        flights = counted[f"in flight, device {device}"]
        assert (max(flights), flights[-1]) == (timeline.peak_in_flight(device), 0)
        bytes_ = counted[f"activations as predicted, device {device}"]
        assert bytes_[-1] == 0
        assert 100 <= max(bytes_) <= 100 * timeline.peak_in_flight(device)


@pytest.mark.parametrize(
    ("plan", "peaks"),
    [
        (forward_only(2, 3), [1, 1]),
        (one_f_one_b(4, 8).with_frozen([0, 1]), [1, 1, 2, 1]),
        (zb_h1(4, 8).with_frozen([3]), [4, 4, 4, 1]),
    ],
    ids=["forwards alone", "the first frozen", "the last frozen"],
)
def test_a_microbatch_without_a_backward_lands_with_its_last_action(
    plan: Plan, peaks: list[int], tmp_path: Path
) -> None:
    """Forwards alone were all counted until the end, and I without W, too."""
    timeline = simulate(plan, Costs(1e6, 2e6))
    counted = counters_of(timeline, tmp_path / "trace.json")
    for device, peak in enumerate(peaks):
        flights = counted[f"in flight, device {device}"]
        assert (max(flights), flights[-1]) == (peak, 0)
        assert timeline.peak_in_flight(device) == peak


def test_a_trace_of_unknown_bytes_counts_microbatches_alone(tmp_path: Path) -> None:
    save_chrome_trace({"plan": simulate(one_f_one_b(2, 2), Costs(1, 1))}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "in flight, device 0",
        "in flight, device 1",
    }

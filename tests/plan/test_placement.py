"""Where stages live."""

import pickle
from collections.abc import Callable

import pytest

from pykern.plan import Placement


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        (Placement.linear(3), (0, 1, 2)),
        (Placement.looped(3, num_chunks=2), (0, 1, 2, 0, 1, 2)),
        (Placement.wave(3, waves=1), (0, 1, 2, 2, 1, 0)),
        (Placement.wave(2, waves=2), (0, 1, 1, 0, 0, 1, 1, 0)),
        (Placement(4, [3, 3, 0]), (3, 3, 0)),
    ],
)
def test_device_of_every_stage(placement: Placement, devices: tuple[int, ...]) -> None:
    assert placement.replicas == (devices,)
    assert placement.num_stages == len(devices)
    assert tuple(placement.device_of(stage) for stage in range(len(devices))) == devices
    copy = pickle.loads(pickle.dumps(placement))
    assert copy == placement
    assert hash(copy) == hash(placement)


def test_placements_differ_by_devices_and_by_stages() -> None:
    assert Placement(2, [0]) != Placement(3, [0])
    assert Placement.looped(2, 2) != Placement.wave(2, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.linear(0), "num_devices must be 1 to 65536, got 0"),
        (lambda: Placement.looped(2, -1), "num_chunks must be 1 to 65536, got -1"),
        (lambda: Placement.wave(2, 0), "waves must be 1 to 65536, got 0"),
        (lambda: Placement.wave(60000, 60000), "num_stages must be 1 to 65536, got 7200000000"),
        (lambda: Placement(2, []), "num_stages must be 1 to 65536, got 0"),
        (lambda: Placement(2, [0, 2]), "devices of stages must be 0 to 1, got 2 for stage 1"),
        (lambda: Placement(2, [-1]), "devices of stages must be .* got -1 for stage 0"),
        (lambda: Placement(10**9, [0]), "num_devices must be 1 to 65536"),
    ],
)
def test_bad_numbers_are_refused(make: Callable[[], Placement], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("stage", [-1, 3])
def test_a_stage_that_is_not_there_has_no_device(stage: int) -> None:
    with pytest.raises(IndexError, match=f"stage must be 0 to 2, got {stage}"):
        Placement.linear(3).device_of(stage)

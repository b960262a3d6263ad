"""Times of collectives: against the ring itself, step by step, and by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.scale import Cluster, Gpu, Layout, Link, Mesh, Ring

CLUSTER = Cluster(Gpu(1000.0, 0.5, 1e9, 10.0), 8, Link(100.0, 3.0), Link(10.0, 7.0), 5.0)


def walked_ns(ring: Ring, num_bytes: float, rounds: int) -> float:
    """Members pass pieces on, all at once; the slowest of a box's shares sets each step's pace."""
    n = ring.num_members
    cards = n // ring.num_boxes
    slowest = 100.0 if ring.num_boxes == 1 else min(100.0, 10.0 * cards)
    now_ns = 5.0
    for _ in range(rounds):
        for step in range(n - 1):
            crosses = step < ring.num_boxes - 1
            now_ns += (7.0 if crosses else 3.0) + num_bytes / n / slowest
    return now_ns


@pytest.mark.parametrize(("members", "boxes"), [(2, 1), (8, 1), (2, 2), (16, 2), (64, 16)])
def test_a_collective_takes_what_its_steps_take(members: int, boxes: int) -> None:
    ring = Ring(CLUSTER, members, boxes)
    assert ring.reduce_scatter_ns(1e6) == pytest.approx(walked_ns(ring, 1e6, 1), rel=1e-12)
    assert ring.all_gather_ns(1e6) == pytest.approx(walked_ns(ring, 1e6, 1), rel=1e-12)
    assert ring.all_reduce_ns(1e6) == pytest.approx(walked_ns(ring, 1e6, 2), rel=1e-12)


def test_four_gpus_by_hand() -> None:
    # 5 to start; twice three steps of 3 and of a quarter of 4,000 bytes at 100 a ns.
    assert Ring(CLUSTER, 4, 1).all_reduce_ns(4000) == 5 + 2 * 3 * (3 + 10)
    # Two boxes with one of them each: one step, over the network.
    assert Ring(CLUSTER, 2, 2).all_reduce_ns(4000) == 5 + 2 * (7 + 200)
    # Twelve of a box have more cards than NVLink can feed.
    assert Ring(CLUSTER, 24, 2).bytes_per_ns == 100


def test_gpus_divide_the_cards_of_a_box_by_hand() -> None:
    two = replace(CLUSTER, cards=2)
    # Eight rings leave each box, one for each GPU: a quarter of a card, 2.5 bytes a ns.
    assert Ring(two, 2, 2).all_reduce_ns(4000) == 5 + 2 * (7 + 2000 / 2.5)
    # Two rings, each with four members in a box, have a card each.
    assert Ring(two, 8, 2).bytes_per_ns == 10
    # One ring has both; NVLink is as fast as before.
    assert Ring(two, 16, 2).bytes_per_ns == 20
    assert Ring(two, 8, 1).bytes_per_ns == 100
    # Two devices of four shards send to other boxes, or one device of eight.
    assert Mesh(two, Layout(1, 4, 4)).link(1, 2) == Link(2.5, 7.0)
    assert Mesh(two, Layout(1, 8, 2)).link(0, 1) == Link(2.5, 7.0)
    # Two devices of two shards: half a card each. Two of one shard: one card each, and not more.
    assert Mesh(two, Layout(1, 2, 8)).link(3, 4) == Link(5.0, 7.0)
    assert Mesh(two, Layout(1, 1, 16)).link(7, 8) == CLUSTER.between
    assert Mesh(replace(CLUSTER, cards=3), Layout(1, 1, 16)).link(7, 8) == CLUSTER.between
    assert Mesh(two, Layout(1, 1, 16)).link(6, 7) == CLUSTER.inside


@pytest.mark.parametrize("cards", [0, 9])
def test_boxes_have_at_most_a_card_per_gpu(cards: int) -> None:
    with pytest.raises(ValueError, match=f"cards must be 1 to 8, the GPUs of a box, got {cards}. "):
        replace(CLUSTER, cards=cards)
    with pytest.raises(TypeError, match="cards must be an int, got True"):
        replace(CLUSTER, cards=True)


def test_one_gpu_waits_for_nobody() -> None:
    assert Ring(CLUSTER, 1, 1).all_reduce_ns(1e9) == 0


@given(st.integers(2, 64), st.floats(0, 1e9), st.floats(1, 2))
def test_more_members_or_bytes_take_longer_but_never_more_than_twice_the_bytes(
    members: int, num_bytes: float, more: float
) -> None:
    ring = Ring(CLUSTER, members, 1)
    time_ns = ring.all_reduce_ns(num_bytes)
    assert time_ns <= ring.all_reduce_ns(num_bytes * more)
    assert time_ns < Ring(CLUSTER, members + 1, 1).all_reduce_ns(num_bytes)
    steps_ns = 5 + 2 * (members - 1) * 3
    assert num_bytes / 100 <= (time_ns - steps_ns) * (1 + 1e-9) + 1e-6
    assert time_ns - steps_ns <= 2 * num_bytes / 100 * (1 + 1e-9) + 1e-6


def test_slices_stay_closest_then_devices_of_a_pipeline_then_pipelines() -> None:
    inside = Mesh(CLUSTER, Layout(8, 2, 4))
    assert not inside.over_boxes
    assert (inside.tensor_ring.num_members, inside.tensor_ring.num_boxes) == (2, 1)
    assert (inside.data_ring.num_members, inside.data_ring.num_boxes) == (8, 8)
    assert {inside.link(a, a + 1) for a in range(3)} == {CLUSTER.inside}

    shared = Mesh(CLUSTER, Layout(8, 2, 2))
    assert (shared.data_ring.num_members, shared.data_ring.num_boxes) == (8, 4)

    # Four devices of two slices fill a box: every fourth boundary goes over the network.
    over = Mesh(CLUSTER, Layout(2, 2, 8))
    assert over.over_boxes
    assert (over.data_ring.num_members, over.data_ring.num_boxes) == (2, 2)
    crossing = [over.link(a, a + 1) == CLUSTER.between for a in range(7)]
    assert crossing == [False, False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((1, 3, 1), "tensor must divide the box, 8 GPUs, got 3"),
        ((1, 16, 1), "tensor must divide the box, .* GPUs, got 16"),
        ((1, 2, 3), "tensor x pipeline must divide the box, 8 GPUs, or be a multiple of it, got 6"),
        ((3, 2, 2), "GPUs must divide the box, 8 GPUs, or be a multiple of it, got 12"),
        ((0, 1, 1), "data must be 1 to 16777216, got 0"),
    ],
)
def test_uneven_boxes_are_refused(layout: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(CLUSTER, Layout(*layout))

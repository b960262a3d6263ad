"""Predictions against sums by hand, published counts and what must hold for any figures."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from pykern.plan import Kind, Memory, Plan, peak_bytes
from pykern.scale import (
    DGX_H100,
    Cluster,
    Gpu,
    Job,
    Layout,
    Link,
    Mesh,
    Part,
    Prediction,
    Ring,
    Transformer,
    best,
    choose,
    layouts,
    predict,
)
from pykern.scale.predict import NOT_PREDICTED, least_ns, model_flops
from pykern.schedules import by_name

SMALL = Transformer(num_layers=8, width=64, sequence=16, vocabulary=100)
CLUSTER = Cluster(Gpu(1000.0, 0.5, 1e9, 10.0), 8, Link(100.0, 3.0), Link(10.0, 7.0), 5.0)
WIDE = Transformer(num_layers=32, width=4096, sequence=4096, vocabulary=32_000)


def test_parameters_and_operations_are_those_of_the_papers() -> None:
    m = WIDE
    assert m.num_parameters == 12 * 32 * 4096**2 + 2 * 32_000 * 4096
    # Narayanan et al., 2021, with three passes rather than the four of full recompute.
    rows, s, h = 512, m.sequence, m.width
    published = (
        72 * rows * s * m.num_layers * h**2 * (1 + s / (6 * h) + m.vocabulary / (12 * 32 * h))
    )
    assert model_flops(Job(m, rows)) == pytest.approx(published, rel=1e-12)
    # Korthikanti et al., 2022: 34 bytes of a token's width, of which 10 are not sliced.
    (whole,) = Transformer(1, h, s, 1).parts(1)
    middle = Part(whole.model, 1, False, False)
    assert middle.activation_bytes(s, 1) == 34 * s * h
    assert middle.activation_bytes(s, 8) == 13 * s * h


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_stages_share_out_the_whole_model(num_stages: int) -> None:
    parts = SMALL.parts(num_stages)
    assert sum(part.num_parameters for part in parts) == SMALL.num_parameters
    sizes = [part.num_layers for part in parts]
    assert sum(sizes) == 8
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [part.has_head for part in parts] == [False] * (num_stages - 1) + [True]


def test_one_gpu_by_hand() -> None:
    job = Job(SMALL, batch=6, microbatch=2)
    found = predict(job, CLUSTER, Layout(1, 1, 1), "one_f_one_b")
    weights = 2 * (12 * 8 * 64**2 + 100 * 64) * 32 / 500
    scores = 4 * 8 * 16 * 64 * 32 / 500
    # Norms, dropouts and GELU, at 10 bytes a ns.
    others = 8 * 64 * (22 + 34 + 16 + 24) * 32 / 10
    assert found.makespan_ns == pytest.approx(3 * (3 * weights + 3 * scores + others))
    assert found.update_ns == pytest.approx(SMALL.num_parameters * 28 / 10)
    assert found.step_ns == pytest.approx(found.makespan_ns + found.update_ns)
    nothing = (found.bubble_ratio, found.tensor_ns, found.reduction_ns, found.exposed_ns)
    assert nothing == (0, 0, 0, 0)
    held = 16 * SMALL.num_parameters + 32 * (8 * 34 * 64 + 4 * 100)
    assert found.memory_bytes == pytest.approx(held)


def test_two_pipelines_of_two_slices_of_two_devices_by_hand() -> None:
    job = Job(SMALL, batch=2)
    found = predict(job, CLUSTER, Layout(2, 2, 2), "one_f_one_b")
    slices, pipelines = Ring(CLUSTER, 2, 1), Ring(CLUSTER, 2, 1)
    message = 16 * 64 * 2
    sums = 4 * 2 * slices.all_reduce_ns(message)
    first = 16 * 2 * 12 * 4 * 64**2 / 500 / 2
    last = 16 * 2 * (12 * 4 * 64**2 + 100 * 64) / 500 / 2
    scores = 16 * 4 * 4 * 16 * 64 / 500 / 2
    sent = 3 + message / 100
    others = 4 * 64 * (22 + 34 + (16 + 24) / 2) * 16 / 10
    span = 3 * (first + last + 2 * scores) + 2 * others + 4 * sums + 2 * sent
    assert found.makespan_ns == pytest.approx(span)
    assert found.tensor_ns == pytest.approx(2 * sums)
    # The first device ends last, and its sums begin then.
    table = 4 * (12 * 4 * 64**2 + 100 * 64) / 2
    assert found.exposed_ns == pytest.approx(pipelines.all_reduce_ns(table))
    assert found.reduction_ns == pytest.approx(found.exposed_ns)


def test_a_reduction_hides_behind_the_stages_that_are_not_done() -> None:
    job = Job(SMALL, batch=16)
    found = predict(job, CLUSTER, Layout(2, 1, 2), "interleaved")
    assert 0 < found.exposed_ns < found.reduction_ns
    slow = replace(CLUSTER, inside=Link(1.0, 3.0))
    shown = predict(job, slow, Layout(2, 1, 2), "interleaved")
    assert shown.exposed_ns < shown.reduction_ns
    # With all the time in the world for the plan, only the stage that ends last shows.
    lazy = replace(CLUSTER, gpu=replace(CLUSTER.gpu, flops_per_ns=1.0))
    least = predict(job, lazy, Layout(2, 1, 2), "interleaved")
    first = SMALL.parts(4)[0].num_parameters * 4
    assert least.exposed_ns == pytest.approx(Ring(CLUSTER, 2, 1).all_reduce_ns(first))


def test_zero_1_shares_the_moments_out_and_sends_the_same() -> None:
    plain, zero = Job(SMALL, batch=8), Job(SMALL, batch=8, zero=1)
    layout = Layout(4, 1, 1)
    without = predict(plain, CLUSTER, layout, "one_f_one_b")
    found = predict(zero, CLUSTER, layout, "one_f_one_b")
    saved = 8 * SMALL.num_parameters * 3 / 4
    assert without.memory_bytes - found.memory_bytes == pytest.approx(saved)
    assert found.update_ns == pytest.approx(without.update_ns / 4)
    # An all-reduce is both halves with one start.
    assert found.reduction_ns + found.gather_ns == pytest.approx(without.reduction_ns + 5)
    alone = Layout(1, 1, 2)
    assert predict(zero, CLUSTER, alone, "gpipe") == predict(plain, CLUSTER, alone, "gpipe")


def test_better_hardware_is_never_slower() -> None:
    job = Job(WIDE, batch=64)
    for layout in (Layout(8, 2, 4), Layout(64, 1, 1), Layout(2, 2, 16)):
        figures = [DGX_H100]
        figures.append(replace(figures[-1], between=Link(100.0, 9_600.0)))
        figures.append(replace(figures[-1], inside=Link(740.0, 3_400.0)))
        figures.append(replace(figures[-1], gpu=replace(figures[-1].gpu, efficiency=0.8)))
        steps = [predict(job, each, layout, "one_f_one_b").step_ns for each in figures]
        assert all(a >= b for a, b in pairwise(steps))
        assert steps[-1] < steps[0]


@pytest.mark.parametrize("layout", [Layout(16, 2, 4), Layout(2, 8, 2), Layout(2, 2, 16)])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved"])
def test_fewer_cards_are_never_faster(layout: Layout, schedule: str) -> None:
    job = Job(WIDE, batch=64, zero=1)
    found = [
        predict(job, replace(DGX_H100, cards=cards), layout, schedule) for cards in range(8, 0, -1)
    ]
    assert found[0] == predict(job, DGX_H100, layout, schedule)
    assert all(more.step_ns <= fewer.step_ns for more, fewer in pairwise(found))
    assert found[0].gather_ns < found[-1].gather_ns
    # Messages within a box are as fast as before.
    assert {each.tensor_ns for each in found} == {found[0].tensor_ns}
    if not found[0].over_boxes:
        assert {each.makespan_ns for each in found} == {found[0].makespan_ns}


def test_a_pipeline_over_boxes_divides_the_cards_by_hand() -> None:
    job, layout = Job(SMALL, batch=1), Layout(1, 8, 2)
    own, one = (
        predict(job, replace(CLUSTER, cards=cards), layout, "one_f_one_b") for cards in (8, 1)
    )
    # An output and its gradient, each at an eighth of 10 bytes a ns.
    message = 16 * 64 * 2
    assert one.makespan_ns - own.makespan_ns == pytest.approx(2 * 7 * message / 10)


def test_nothing_runs_faster_than_its_operations() -> None:
    for found in best(Job(WIDE, batch=64), DGX_H100, 16, ("one_f_one_b", "zb_h1"), top=99):
        least = least_ns(Job(WIDE, batch=64), Mesh(DGX_H100, found.layout))
        assert found.makespan_ns >= least * (1 - 1e-12)
        assert 0 < found.flops_ratio < DGX_H100.gpu.efficiency
        assert found.memory_bytes <= DGX_H100.gpu.memory_bytes
        parts = found.makespan_ns + found.exposed_ns + found.update_ns + found.gather_ns
        assert found.step_ns == pytest.approx(parts)


def test_layouts_are_all_that_fill_the_boxes() -> None:
    powers = (1, 2, 4, 8)
    expected = {(8 // (t * p), t, p) for t in powers for p in powers if t * p <= 8}
    assert set(layouts(DGX_H100, 8)) == expected
    many = set(layouts(DGX_H100, 24))
    assert all(layout.num_gpus == 24 for layout in many)
    assert Layout(3, 1, 8) in many
    assert Layout(1, 8, 3) in many
    assert Layout(8, 1, 3) not in many
    assert list(layouts(DGX_H100, 12)) == []


def test_the_best_come_first_and_each_layout_once() -> None:
    names = ("one_f_one_b", "interleaved")
    found = best(Job(WIDE, batch=64), DGX_H100, 16, names, top=99)
    steps = [each.step_ns for each in found]
    assert steps == sorted(steps)
    assert len({each.layout for each in found}) == len(found) > 3
    for each in found:
        assert each.schedule in names
        assert each == predict(Job(WIDE, batch=64), DGX_H100, each.layout, each.schedule)
    for top in (1, 2, 4):
        assert best(Job(WIDE, batch=64), DGX_H100, 16, names, top) == found[:top]
    assert best(Job(Transformer(96, 12_288, 2048, 50_000), 64), DGX_H100, 8, ("gpipe",), 1) == []


def test_a_pipeline_longer_than_the_model_gets_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for as many devices as the cluster has took minutes, and were then refused."""
    asked: list[int] = []
    gpipe = by_name["gpipe"]

    def counting(num_devices: int, num_microbatches: int) -> Plan:
        asked.append(num_devices)
        return gpipe(num_devices, num_microbatches)

    monkeypatch.setitem(by_name, "gpipe", counting)
    assert best(Job(WIDE, batch=512), DGX_H100, 65_536, ("gpipe",), top=3)
    assert 0 < max(asked) <= WIDE.num_layers


def test_of_what_is_too_large_no_large_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of millions of actions were made and simulated, and did not fit."""
    asked: list[int] = []
    rule = by_name["one_f_one_b"]

    def counting(num_devices: int, num_microbatches: int) -> Plan:
        asked.append(num_devices * num_microbatches)
        return rule(num_devices, num_microbatches)

    monkeypatch.setitem(by_name, "one_f_one_b", counting)
    job = Job(Transformer(4096, 8192, 4096, 32_000), batch=512)
    assert best(job, DGX_H100, 4096, ("one_f_one_b",), top=3) == []
    assert 0 < max(asked) < 1 << 19


def test_small_plans_tell_of_large_ones_what_these_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    job, names = Job(WIDE, batch=64), [*(by_name.keys() - NOT_PREDICTED)]
    usual = best(job, DGX_H100, 32, names, top=99)
    monkeypatch.setattr(choose, "_LARGE", 1)
    assert best(job, DGX_H100, 32, names, top=99) == usual


@pytest.mark.parametrize("name", sorted(by_name.keys() - NOT_PREDICTED))
def test_with_more_microbatches_than_devices_no_less_is_held(name: str) -> None:
    for num_devices in (1, 2, 3, 4, 7, 8):
        most: dict[int, list[float]] = {}
        for count in range(1, 3 * num_devices + 2):
            with suppress(ValueError):
                plan = by_name[name](num_devices, count)
                first, rest = plan.num_stages // 2, plan.num_stages - plan.num_stages // 2
                shares = [[1.0] * plan.num_stages, [2.0] * first + [1.0] * rest]
                most[count] = [max(peak_bytes(plan, Memory(share))) for share in shares]
        for few in (count for count in most if count <= num_devices):
            for held in (held for count, held in most.items() if count > few):
                assert all(less <= more for less, more in zip(most[few], held, strict=True))


def test_which_schedules_are_not_predicted_is_what_their_plans_say() -> None:
    unfit = set()
    for name, schedule in by_name.items():
        plan = schedule(4, 8)
        trains = plan.has(Kind.B) or plan.has(Kind.W)
        whole = plan.num_slices == plan.placement.num_replicas == 1
        if not trains or not whole or plan.has(Kind.U):
            unfit.add(name)
    assert set(NOT_PREDICTED) == unfit
    with pytest.raises(
        ValueError, match="schedule must be one that is predicted, got 'chimera', which holds two"
    ):
        best(Job(SMALL, 8), CLUSTER, 8, ("gpipe", "chimera"), 1)
    with pytest.raises(ValueError, match=r"schedule must be one of .*, got 'nothing'"):
        predict(Job(SMALL, 8), CLUSTER, Layout(1, 1, 1), "nothing")


def refused(batch: int, microbatch: int = 1, zero: int = 0) -> Prediction:
    return predict(Job(SMALL, batch, microbatch, zero), CLUSTER, Layout(4, 1, 2), "gpipe")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"batch must be a multiple of 4 pipelines with microbatches of .*, got 6"
    ):
        refused(6)
    with pytest.raises(
        ValueError, match=r"batch must be a multiple of 4 pipelines with microbatches of .*, got 4"
    ):
        refused(4, microbatch=2)
    with pytest.raises(ValueError, match="zero must be 0 or 1, got 2"):
        refused(4, zero=2)
    with pytest.raises(ValueError, match="batch must be 1 to 16777216, got 0"):
        refused(0)
    with pytest.raises(
        ValueError, match="num_layers must be at least 16, one for each stage, got 8"
    ):
        predict(Job(SMALL, 8), CLUSTER, Layout(1, 1, 16), "gpipe")

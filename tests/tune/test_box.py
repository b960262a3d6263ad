"""`pykern.tune(box=...)`: plans for a box, by devices that are like its own."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern import _C
from pykern.boxes import Box, BoxDevice, BoxHost, BoxLink, save
from pykern.plan import simulate
from pykern.schedules import forward_only, gpipe
from pykern.tuning import cache, measure, run
from pykern.tuning.asked import Asked
from pykern.tuning.box_costs import BoxCosts, box_costs
from pykern.tuning.held import held as held_bytes

from .synthetic import measurements

WIDTH, RATE = 8, 20.0
CORE = BoxDevice("CPU core", None, RATE, None, None, None)
FAST, SLOW = BoxLink(((0, 1), (2, 3)), 100.0, 1.0), BoxLink(((0, 1, 2, 3),), 2.0, 300.0)
BOX = Box(3, "4 cores", "measured", (), (CORE,) * 4, (FAST, SLOW), BoxHost(4, None))
TIMES = [10.0, 20.0, 30.0, 40.0, 50.0]
SPANS = [range(1), range(1, 2), range(2, 3), range(3, 5)]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in TIMES))


def asked(devices: str = "cpu:1", **more: Any) -> Asked:
    x = torch.ones(8, WIDTH)
    return Asked(mlp(), x, F.mse_loss, devices, x, box=BOX, **more)


def costs_on_box(**changes: Any) -> BoxCosts:
    return box_costs(asked(), measurements(TIMES, **({"cores": 1} | changes)), BOX)


def tuned(**more: Any) -> pykern.Choice:
    x = torch.ones(8, WIDTH)
    given: dict[str, Any] = {"sample": x, "target": x, "devices": "cpu:1", "box": BOX}
    return pykern.tune(mlp(), loss_fn=F.mse_loss, **(given | more))


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "measure", lambda *_: measurements(TIMES, cores=1))


def test_microbatches_take_the_links_between_their_devices() -> None:
    plan, rows = forward_only(4, 1), 2
    costs = costs_on_box().costs_of(plan, SPANS, rows)
    # Units hand 100 bytes a row on.
    fast, slow = 1 + 200 / 100, 300 + 200 / 2
    work = rows * sum(TIMES)
    assert simulate(plan, costs).makespan_ns == pytest.approx(work + 2 * fast + slow)


def test_an_order_is_searched_with_the_slowest_link() -> None:
    costs = costs_on_box().costs(SPANS, 2)
    assert (costs.transfer_ns, costs.bandwidth) == (300.0, 2.0)
    assert costs.message_bytes == [200.0] * 4


def test_a_sum_that_one_device_cannot_show_takes_the_rates_of_the_box() -> None:
    num_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    found = costs_on_box()
    assert found.reduce_ns == pytest.approx([num_bytes / 2 + 3 * num_bytes / RATE] * len(TIMES))
    # Two replicas of two devices each: their two stages are copied at the same time.
    assert found.outside_ns(0, 2) == pytest.approx(len(TIMES) * num_bytes / 2 / 2)
    assert found.outside_ns(0, 1) == 0


def test_a_sum_that_was_measured_stays() -> None:
    found = costs_on_box(cores=2, replica_ns=7.0)
    assert found.reduce_ns == (1000.0,) * len(TIMES)
    assert found.outside_ns(0, 4) == 3 * 7.0


def test_devices_of_a_box_do_not_slow_each_other_down() -> None:
    found = costs_on_box(speeds=((1.0,),) * 2)
    assert found.cores == 4
    assert found.speeds_for(2) == [1.0] * 4


@pytest.mark.usefixtures("injected")
def test_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run_in_turn", lambda *_: pytest.fail("the box is not here"))
    choice = tuned()
    assert all(one.measured_ns is None for one in choice.proposals)
    assert all(one.plan.num_devices == 4 for one in choice.proposals)
    times = [one.predicted_ns for one in choice.proposals]
    assert times == sorted(times)
    assert "4 devices of 4 cores (measured); " in str(choice)
    assert str(choice).endswith(", 0 run")


@pytest.mark.usefixtures("injected")
def test_slow_links_are_avoided() -> None:
    """With replicas on the fast pairs, nothing but sums crosses the slow link."""
    alike = replace(BOX, links=(replace(SLOW, latency_ns=1.0, bytes_per_ns=100.0),))
    slow, fast = tuned().best, tuned(box=alike).best
    assert slow.predicted_ns > fast.predicted_ns
    crossing = replace(BOX, links=(replace(SLOW, latency_ns=1e6),))
    assert tuned(box=crossing).best.plan.placement.num_stages == 1


@pytest.mark.usefixtures("injected")
def test_the_choice_is_for_the_devices_of_the_box(tmp_path: Path) -> None:
    choice, x = tuned(), torch.randn(8, WIDTH)
    choice.save(tmp_path / "plan.json")
    with pykern.Pipeline(mlp(), tuned=tmp_path / "plan.json", loss_fn=F.mse_loss) as pipe:
        assert pipe.plan.num_devices == 4
        loss = pipe.step(x, target=x)
    torch.testing.assert_close(loss, F.mse_loss(mlp()(x), x).detach())
    with choice.pipeline() as pipe:
        assert pipe.plan.num_devices == 4


@pytest.mark.usefixtures("injected")
def test_the_memory_is_that_of_each_device_of_the_box() -> None:
    assert all(max(one.peak_bytes) <= 4_000 for one in tuned(memory=4_000).proposals)
    with pytest.raises(ValueError, match="memory must be enough for some plan, got 100 bytes"):
        tuned(memory=100)


def test_units_are_measured_with_the_threads_of_a_worker_on_the_box(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: set[int] = set()

    def noted(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found.add(torch.get_num_threads())
        return F.mse_loss(x, target)

    def held(*given: Any) -> Any:
        table = held_bytes(*given)
        # Bytes are counted without a worker.
        found.clear()
        return table

    monkeypatch.setattr(measure, "held_bytes", held)
    with _C.Undo(torch.set_num_threads, torch.get_num_threads()):
        torch.set_num_threads(8)
        measure.measure(replace(asked(), loss_fn=noted), lambda _: None)
    # One worker alone would have all eight; four share them.
    assert found == {2}


def test_measurements_are_resumed_for_as_many_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "measured.json"
    first = tuned(resume=file)
    monkeypatch.setattr(cache, "measure", lambda *_: pytest.fail("measured again"))
    assert tuned(resume=file).best == first.best
    # Fewer workers would have had more threads each.
    with pytest.raises(ValueError, match="resume must be a file of the same model"):
        tuned(resume=file, box=BOX.first(2))


def test_a_profile_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "measure", lambda *_: measurements(TIMES, cores=1))
    save(BOX, tmp_path / "box.json")
    assert tuned(box=tmp_path / "box.json").best == tuned().best


GPU = BoxDevice("NVIDIA X", 8e9, 1_000.0, None, (9, 0), 132)
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "one device": (
        {"box": BOX.first(1)},
        "box must have several devices, got one, CPU core. Tune without a box",
    ),
    "devices that differ": (
        {"box": replace(BOX, devices=(CORE, CORE, CORE, replace(CORE, name="another core")))},
        "devices[3] of the box must be like devices[0], got 'another core'. Take a box of equal "
        "devices",
    ),
    "workers for GPUs": (
        {"box": replace(BOX, devices=(GPU,) * 4)},
        "devices must be like those of the box, whose times they tell, got 'cpu' for NVIDIA X. "
        "Measure on such a device",
    ),
    "no link": ({"box": replace(BOX, links=(FAST,))}, "the box must tell its link between 0 and 2"),
    "no rate": (
        {"box": replace(BOX, devices=(replace(CORE, memory_bytes_per_ns=None),) * 4)},
        "the box must tell its memory_bytes_per_ns for a prediction, got null",
    ),
    "no such name": ({"box": "dgx"}, "box must be one of 'a100x4', "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_box_that_cannot_serve_is_refused_before_anything_is_measured(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "measure", lambda *_: pytest.fail("the work would be lost"))
    more, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        tuned(**more)


def test_a_sum_takes_longer_with_more_replicas() -> None:
    found = costs_on_box()
    plans = [gpipe(1, 1), pykern.plan.with_replicas(gpipe(1, 1), 4)]
    whole = [range(len(TIMES))]
    one, four = (found.costs_of(plan, whole, 1).reduce_ns for plan in plans)
    assert one == [0.0]
    assert four == pytest.approx([3 * sum(found.reduce_ns)])

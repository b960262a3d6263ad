"""The orders of plans that are issued to the model of a driver."""

import pytest
import torch

from pykern.boxes import load
from pykern.partition.balance import Partition
from pykern.plan import Plan, with_reductions
from pykern.rehearse import Rehearsal, RehearsedPipeline
from pykern.rehearse.driver_model import DriverModel
from pykern.rehearse.memory import Fit
from pykern.rehearse.order import Orders, orders_of
from pykern.runtime.devices import DeviceLane
from pykern.schedules import by_name
from pykern.sizes.estimates import Bytes, Estimate
from tests.fake_cuda.fake import build

NAMES = ["gpipe", "one_f_one_b", "interleaved", "hanayo", "chimera", "zb_h1", "zb_v", "dualpipe_v"]


def lanes(count: int) -> list[DeviceLane]:
    return [DeviceLane(torch.device("cuda", index)) for index in range(count)]


def plan_of(name: str) -> Plan:
    return with_reductions(by_name[name](4, 8), over_peers=False)


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_plans_of_the_catalogue_break_no_rule(name: str, peers: bool) -> None:
    found = orders_of(plan_of(name), lanes(4), peers=peers)
    assert found.violations == []
    assert found.calls["copies"] >= 2 * 2 * 8


def test_lanes_of_one_gpu_copy_nothing() -> None:
    plan = plan_of("one_f_one_b")
    parts = [DeviceLane(torch.device("cuda", 0), part, 4) for part in range(4)]
    for each in (parts, lanes(1) * 4):
        assert orders_of(plan, each, peers=True).violations == []


def test_a_wait_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third is: what the others put in order, more waits do as well."""

    def without(nth: int) -> list[str]:
        class Dropping(DriverModel):
            def __init__(self, num_gpus: int) -> None:
                super().__init__(num_gpus)
                self.library.fake_drop_wait(nth)

        monkeypatch.setattr("pykern.rehearse.driver_model.DriverModel", Dropping)
        # The package's library leaves out no wait.
        monkeypatch.setattr("pykern.rehearse.driver_model.LIBRARY", build())
        return list(orders_of(plan_of("one_f_one_b"), lanes(4), peers=True).violations)

    found = [without(nth) for nth in range(1, 25)]
    assert sum(map(bool, found)) >= 8
    texts = [text for each in found for text in each]
    assert any("an action" in text and "nothing orders the two" in text for text in texts)


def test_a_violation_fails_the_rehearsal() -> None:
    plan, fit = plan_of("one_f_one_b"), Fit(None, {}, [])
    calls = {"waits": 1, "records": 1, "copies": 1}
    for violations, passes in (([], True), (["a race"], False)):
        orders = {"from GPU to GPU": Orders(violations, calls)}
        one = RehearsedPipeline(plan, [0, 1, 2, 3], [1.0], fit, orders, [], "no step was run")
        found = Rehearsal(load("4x4090"), [one], {})
        assert found.passes is passes
        assert ("Violations of order: 1." in str(found)) is not passes
        assert ("a race" in str(found)) is not passes


@pytest.mark.parametrize(
    ("gib", "shared", "full"), [(7, False, []), (8, False, ["cuda:0"]), (8, True, [])]
)
def test_pipelines_that_fit_alone_may_not_fit_together(
    gib: int, shared: bool, full: list[str]
) -> None:
    """Each was held against the whole GPU: `It fits. It fits.`"""
    plan = plan_of("one_f_one_b")
    held = [Bytes(gib * 2**30, 0, 0, 7 * 2**30, 0), *[Bytes(0, 0, 0, 0, 0)] * 3]
    partition = Partition((), (), (), (), "parameters")
    fit = Fit(Estimate(held, plan, partition, []), {0: (held[0].total, 24e9)}, [])
    one = RehearsedPipeline(plan, [0, 1, 2, 3], [1.0], fit, {}, [], "no step was run")
    found = Rehearsal(load("4x4090"), [one, one], {}, shared)
    assert (found.too_full, found.passes) == (full, not full)
    assert ("All pipelines together do not fit cuda:0." in found.summary()) is bool(full)
    assert Rehearsal(load("4x4090"), [one], {}).passes

"""torch's sanitizer and the fake driver's model find the same races: `FakeCuda.close` compares them
in every test. Here faults are planted, which both must find."""

import ctypes
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern
from tests.diagonal import nightly
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import unchecked_gpus
from tests.fake_cuda.second_judge import Verdict, agree

PLACE = 0x1000, 16


def step(nth: int, options: dict[str, Any]) -> tuple[Verdict, int]:
    """Steps, the last without its nth wait; the verdict, and how many waits that step has."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x, y = torch.randn(2, 8, 4)
    usual: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "microbatches": 4}
    with unchecked_gpus(4) as fake:
        with pykern.Pipeline(layers, loss_fn=mse_loss, **(usual | options)) as pipe:
            for _ in range(2):
                pipe.step(x, target=y)
            fake.drop_wait(nth)
            before = fake.calls("cuStreamWaitEvent")
            pipe.step(x, target=y)
            num_waits = fake.calls("cuStreamWaitEvent") - before
        verdict = agree(fake.log)
    return verdict, num_waits


@pytest.mark.parametrize("every", [11, nightly(1)])
@pytest.mark.parametrize(
    ("options", "at_least"),
    [
        ({"schedule": "gpipe"}, 0.5),
        ({"schedule": "hanayo"}, 0.5),
        ({"schedule": "zb_h1"}, 0.5),
        ({"schedule": "chimera"}, 0.5),
        ({"recompute": "stage"}, 0.5),
        ({"capture": True}, 0.5),
        ({"capture": "step"}, 1),
        ({"capture": True, "schedule": "zb_h1", "devices": "cuda:0/2"}, 0.5),
    ],
    ids=str,
)
def test_a_wait_that_is_left_out_is_found_by_both_or_by_none(
    options: dict[str, Any], at_least: float, every: int
) -> None:
    """A wait that follows from others makes no race."""
    verdict, num_waits = step(0, options)
    assert verdict == ([], [])
    left_out = range(1, num_waits + 1, every)
    found = [step(nth, options)[0] for nth in left_out]
    assert sum(bool(verdict.driver) for verdict in found) >= at_least * len(left_out)
    assert all(bool(verdict.driver) == bool(verdict.torch) for verdict in found)


def test_a_wait_that_only_the_log_lacks_is_a_disagreement() -> None:
    """So the two do not agree by reading the same verdict."""
    with unchecked_gpus(2) as fake:
        one, other = fake.stream(0), fake.stream(1)
        fake.kernel(one, writes=[PLACE])
        fake.order(one, other)
        fake.kernel(other, reads=[PLACE])
        log = fake.log
    assert agree(log) == ([], [])
    with pytest.raises(AssertionError, match=r"only torch sees races.*fake_kernel 1 r"):
        agree([line for line in log if not line.startswith("wait")])
    with pytest.raises(AssertionError, match="only the driver sees races"):
        agree([*log, "told race on that"])


def race(fake: FakeCuda) -> None:
    fake.kernel(fake.stream(0), writes=[PLACE])
    # Some of the bytes, so that memory is cut.
    fake.kernel(fake.stream(1), reads=[(PLACE[0] + 8, 16)])


def free_in_use(fake: FakeCuda) -> None:
    fake.alloc(*PLACE, fake.stream(0))
    fake.kernel(fake.stream(0), reads=[PLACE])
    fake.free(PLACE[0])


def launch_while_running(fake: FakeCuda) -> None:
    streams = [fake.stream(device) for device in (0, 1)]
    executable = ctypes.c_void_p(fake.instantiate(fake.graph(lambda: None)))
    for stream in streams:
        fake.call("cuGraphLaunch", executable, ctypes.c_void_p(stream))


def race_in_a_graph(fake: FakeCuda) -> None:
    whole, node = ctypes.c_void_p(), ctypes.c_void_p()
    fake.retain(0)
    fake.call("cuGraphCreate", ctypes.byref(whole), ctypes.c_uint(0))
    for _ in range(2):
        child = ctypes.c_void_p(fake.graph(lambda: None, writes=[PLACE]))
        nothing = (None, ctypes.c_size_t(0))
        fake.call("cuGraphAddChildGraphNode", ctypes.byref(node), whole, *nothing, child)
    fake.instantiate(whole.value or 0)
    fake.call("cuGraphDestroy", whole)


@pytest.mark.parametrize("fault", [race, free_in_use, launch_while_running, race_in_a_graph])
def test_each_fault_that_both_know_is_found_by_both(fault: Any) -> None:
    with unchecked_gpus(2) as fake:
        fault(fake)
        assert len(fake.violations) == 1
        verdict = agree(fake.log)
    assert len(verdict.driver) == 1
    assert verdict.driver == verdict.torch


def test_the_driver_may_see_more_only_behind_a_race_of_both() -> None:
    """The last kernel follows the read and not the write; torch asks about the read alone."""
    with unchecked_gpus(3) as fake:
        streams = [fake.stream(device) for device in range(3)]
        fake.kernel(streams[0], writes=[PLACE])
        fake.kernel(streams[1], reads=[PLACE])
        fake.order(streams[1], streams[2])
        fake.kernel(streams[2], writes=[PLACE])
        verdict = agree(fake.log)
    assert len(verdict.driver) == 2
    assert verdict.driver[:1] == verdict.torch

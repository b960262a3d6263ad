"""The report names first what was planted in a pipeline that runs: each of 20 times, by night."""

from random import Random

import pytest

from tests.profiling.running import RUNNING

# Those whose clock is the driver model's, whatever else the machine does.
QUICK = "slow link", "item"

pytestmark = pytest.mark.filterwarnings("ignore:called a synchronizing CUDA operation")


def first_causes(name: str, times: int) -> list[str]:
    _, plant = RUNNING[name]
    return [plant(Random(f"{name} {number}")).first_cause for number in range(times)]


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_cause_is_named_first(name: str) -> None:
    assert first_causes(name, 1) == [RUNNING[name][0]]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNNING)
def test_a_planted_cause_is_named_first_20_times_of_20(name: str) -> None:
    assert first_causes(name, 20) == [RUNNING[name][0]] * 20

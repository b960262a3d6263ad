"""Steps of implausible sizes are refused before anything of that size is made."""

import tracemalloc

import pytest
from torch import nn

import pykern


def refused(**options: object) -> str:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    settings = {"devices": "cpu:2", "loss_fn": nn.functional.mse_loss}
    with pytest.raises(ValueError, match="must be at most") as caught:
        pykern.Pipeline(model, **{**settings, **options})  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "auto", "zb_v"])
@pytest.mark.parametrize("microbatches", [2**18 + 1, 2**22, 2**24])
def test_more_microbatches_than_a_step_can_have(schedule: str, microbatches: int) -> None:
    tracemalloc.start()
    try:
        message = refused(schedule=schedule, microbatches=microbatches)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert f"microbatches must be at most 262144 on 2 devices, got {microbatches}" in message
    assert peak < 1 << 22


def test_more_actions_than_a_step_can_have() -> None:
    message = refused(schedule="interleaved", microbatches=200_000, num_chunks=2)
    assert "at most 1048576, got 1600000 for 200000 microbatches of 4 stages" in message


def test_replicas_count_together() -> None:
    message = refused(schedule="gpipe", devices="cpu:4", microbatches=2**19, replicas=2)
    assert "microbatches must be at most 262144 on 4 devices for each of 2 replicas" in message

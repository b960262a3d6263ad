"""The memory that a pipeline with recompute holds."""

import copy

import pytest
import torch

import pykern
from bench.live import counted_bytes
from pykern import schedules
from pykern.models.gpt import gpt, next_token_loss
from pykern.pipeline.choose_levels import choose_levels
from pykern.plan import Memory, peak_bytes


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "interleaved", "hanayo", "chimera"])
def test_every_device_with_several_cells_in_flight_holds_fewer(name: str, num_devices: int) -> None:
    options = {"interleaved": {"num_chunks": 2}, "hanayo": {"waves": 1}}.get(name, {})
    if name == "chimera" and num_devices % 2:
        num_devices += 1
    plan = schedules.by_name[name](num_devices, 2 * num_devices, **options)
    recomputed, _ = choose_levels(plan, "stage")
    whole = Memory(1.0, boundary_bytes=0.0)
    pairs = zip(peak_bytes(plan, whole), peak_bytes(recomputed, whole), strict=True)
    assert all(held < before or before == 1 for before, held in pairs)


def test_two_devices_of_1f1b_hold_less() -> None:
    """The first had two graphs at once, as without recompute: the next R filled a wait."""
    model = gpt(vocab=64, layers=8, width=32, heads=2, context=16)
    tokens = torch.randint(0, 64, (8, 17))
    peaks: dict[str | None, int] = {}
    for recompute in (None, "stage", "layer"):
        with pykern.Pipeline(
            copy.deepcopy(model),
            devices="cpu:2",
            microbatches=4,
            loss_fn=next_token_loss,
            recompute=recompute,
        ) as pipe:
            pipe.step(tokens[:, :-1], target=tokens[:, 1:])
            with counted_bytes(pipe) as devices:
                pipe.step(tokens[:, :-1], target=tokens[:, 1:])
            peaks[recompute] = devices[0].peak
    assert peaks["stage"] < 0.7 * peaks[None]
    assert peaks["layer"] < peaks["stage"]

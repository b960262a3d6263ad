"""Sparse gradients in estimates, whose sums have all entries of both."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
def test_sums_without_values_have_all_entries(schedule: str) -> None:
    model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16))
    ids = torch.randint(64, (4, 10))
    without, with_values = (
        pykern.estimate(
            model,
            devices=2,
            microbatches=4,
            sample=ids,
            target=torch.rand(4, 10, 16),
            loss_fn=F.mse_loss,
            schedule=schedule,
            with_values=of,
        ).devices
        for of in (False, True)
    )
    assert without[1] == with_values[1]
    # Indices are the memory of the ids; without values they are a copy.
    most = with_values[0].activations + ids.nbytes
    assert with_values[0].activations <= without[0].activations <= most

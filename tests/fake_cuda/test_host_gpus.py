"""GPUs that are the host, for several pipelines."""

import gc

import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern
from tests.fake_cuda.host_gpus import host_gpus


def test_addresses_of_a_collected_pipeline_do_not_come_back() -> None:
    # Memory of this size comes back at once. Python chooses when it collects a pipeline.
    x = torch.ones(2, 2**18)
    with host_gpus(2):
        for _ in range(3):
            layers = nn.Sequential(nn.Dropout(0.5), nn.PReLU(), nn.PReLU())
            with pykern.Pipeline(
                layers,
                devices=["cuda:0", "cuda:1"],
                schedule="one_f_one_b",
                microbatches=2,
                loss_fn=mse_loss,
            ) as pipe:
                pipe.step(x, target=x)
            del layers, pipe
            gc.collect()

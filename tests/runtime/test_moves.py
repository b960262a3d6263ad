"""Layers stay on the devices of their stages, whoever moves modules."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pykern


def make() -> pykern.Pipeline:
    layers = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    return pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=mse_loss)


def test_a_module_around_a_pipeline_may_be_moved() -> None:
    x = torch.randn(4, 2, 3, 3)
    with make() as pipe:
        around = nn.Sequential(nn.Linear(3, 3), pipe)
        parameters = dict(pipe.named_parameters())
        around.to("meta")
        assert around[0].weight.is_meta
        assert all(one is parameters[name] for name, one in pipe.named_parameters())
        around.to("meta", torch.float64)
        kinds = {value.dtype for value in (*pipe.parameters(), *pipe.buffers())}
        assert kinds == {torch.float64, torch.int64}
        assert not any(value.is_meta for value in (*pipe.parameters(), *pipe.buffers()))
        assert pipe.step(x.double(), target=x.double()).dtype == torch.float64


def test_a_pipeline_takes_other_types_and_layouts() -> None:
    with make() as pipe:
        assert pipe.to("cpu", torch.float64).cpu() is pipe
        # The overloads of torch 2.13 leave memory_format out.
        cast(Any, pipe).to(memory_format=torch.channels_last)
        assert {value.dtype for value in pipe.parameters()} == {torch.float64}
        with pytest.raises(RuntimeError, match="got meta for layers on cpu"):
            pipe.to(torch.empty(0, device="meta"))
        with pytest.raises(RuntimeError, match="got meta for layers on cpu"):
            pipe.to_empty(device="meta")

"""`pipe.memory`: the bytes of devices, and what is not known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import l1_loss, mse_loss

import pykern
from bench.live import counted_bytes
from pykern.pipeline import memory
from pykern.plan import Kind
from tests.fake_cuda.host_gpus import host_gpus

WIDTH = 32
# The parameters of a linear layer, in bytes.
LINEAR = 4 * (WIDTH * WIDTH + WIDTH)


def pipeline(*layers: nn.Module, devices: str = "cpu:2", **more: Any) -> pykern.Pipeline:
    given = {"microbatches": 4, "loss_fn": mse_loss, "balance": "layers", **more}
    return pykern.Pipeline(nn.Sequential(*layers), devices=devices, **given)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def test_every_part_is_counted_by_device() -> None:
    frozen = linear().requires_grad_(False)
    norm = nn.BatchNorm1d(WIDTH)
    x = torch.randn(16, WIDTH)
    with pipeline(linear(), norm, frozen, linear()) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        pipe.step(x, target=x)
        assert pipe.memory(optimizer=optimizer).devices[0].optimizer == 0
        optimizer.step()
        buffers = {name: value.clone() for name, value in pipe.named_buffers()}
        held = pipe.memory(x, target=x, optimizer=optimizer)
        for name, value in pipe.named_buffers():
            assert torch.equal(value, buffers[name])
    first, last = held.devices
    of_norm = 4 * 2 * WIDTH
    assert (first.parameters, first.gradients) == (LINEAR + of_norm, LINEAR + of_norm)
    assert first.buffers == 4 * 2 * WIDTH + 8
    assert (last.parameters, last.gradients, last.buffers) == (2 * LINEAR, LINEAR, 0)
    # Two moments, and a count of steps for each parameter.
    assert first.optimizer == 2 * (LINEAR + of_norm) + 4 * 4
    assert last.optimizer == 2 * LINEAR + 2 * 4
    assert {of.transfers for of in held.devices} == {0}
    assert list(held.unknown) == ["peak", "graphs", "free"]


def test_the_predicted_peak_is_what_a_step_holds() -> None:
    x = torch.randn(16, WIDTH)
    with pipeline(linear(), nn.GELU(), linear(), nn.GELU()) as pipe:
        pipe.step(x, target=x)
        held = pipe.memory(x, target=x)
        with counted_bytes(pipe) as counted:
            pipe.step(x, target=x)
    for device, live in zip(held.devices, counted, strict=True):
        assert device.activations is not None
        assert 0 < live.peak <= device.activations < 1.5 * live.peak + 4096


def test_the_loss_of_one_microbatch_is_held_at_a_time() -> None:
    x = torch.randn(256, WIDTH)
    of_microbatch = 4 * 64 * WIDTH
    peaks = []
    for loss_fn in (l1_loss, mse_loss):
        with pipeline(linear(), linear(), loss_fn=loss_fn) as pipe:
            held = pipe.memory(x, target=x)
        peaks.append(max(device.activations or 0 for device in held.devices))
    # On the CPU the mean of squares keeps the memory of all squares.
    assert peaks[1] <= peaks[0] + of_microbatch
    budget = pykern.Budget(peaks[1], x[:64], x[:64])
    with pipeline(linear(), linear(), recompute=budget) as pipe:
        assert not pipe.plan.has(Kind.R)


def test_what_is_unknown_is_not_0_and_says_why() -> None:
    with pipeline(linear(), linear()) as pipe:
        held = pipe.memory()
    device = held.devices[0]
    assert (device.activations, device.optimizer, device.peak) == (None, None, None)
    assert "activations: not predicted without a batch" in str(held)
    assert str(held).splitlines()[1].split().count("unknown") == 5
    with pytest.raises(AttributeError):
        device.peak = 1  # type: ignore[misc]


def test_pools_of_graphs_and_free_bytes_of_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the answers that torch gives, in its place."""
    segments = [
        {"device": 1, "total_size": 100, "segment_pool_id": (0, 0)},
        {"device": 1, "total_size": 20, "segment_pool_id": (0, 1)},
        {"device": 1, "total_size": 3, "segment_pool_id": (4, 0)},
        {"device": 0, "total_size": 5000, "segment_pool_id": (0, 1)},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700, 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 90)
    assert memory._of_gpu(torch.device("cuda", 1)) == (90, 23, 700)


def test_an_async_pipeline_knows_its_optimizer() -> None:
    x = torch.randn(6, WIDTH)
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam
    with pykern.AsyncPipeline(
        [linear(), linear()], devices="cpu:2", microbatches=3, optimizer=make, loss_fn=mse_loss
    ) as pipe:
        pipe.step(x, target=x)
        pipe.flush()
        held = pipe.memory(x, target=x)
    assert held.devices[1].optimizer == 2 * LINEAR + 2 * 4
    assert held.devices[0].activations is None


def test_rings_of_gpus_are_counted_as_they_are_allocated() -> None:
    def transfers() -> list[int]:
        x = torch.randn(16, WIDTH)
        with pipeline(linear(), linear(), devices="cuda") as pipe:
            assert {device.transfers for device in pipe.memory().devices} == {0}
            pipe.step(x, target=x)
            return [device.transfers for device in pipe.memory().devices]

    with host_gpus(2):
        first, second = transfers()
    # A slot has the four rows of a microbatch; gradients go to the first device.
    assert first > 0
    assert first % (4 * WIDTH * 4) == second % (4 * WIDTH * 4) == 0
    assert second >= 2 * 4 * WIDTH * 4


def test_sparse_gradients_count_by_their_parts() -> None:
    table, ids = nn.Embedding(WIDTH, WIDTH, sparse=True), torch.arange(16)
    budget = pykern.Budget(2**20, ids[:4], torch.ones(4, WIDTH))
    with pipeline(table, linear(), recompute=budget) as pipe:
        first, _ = pipe.memory(ids, target=torch.ones(16, WIDTH)).devices
    # The outputs of two microbatches in flight.
    two = 2 * 4 * 4 * WIDTH
    assert first.activations is not None
    assert first.activations >= two
    found = pykern.estimate(
        [table, linear()],
        devices=2,
        microbatches=4,
        sample=ids[:4],
        target=torch.ones(4, WIDTH),
        loss_fn=mse_loss,
    )
    assert found.devices[0].activations >= two

"""Measuring GPUs, their links, and a box of them. Run by test_device_oracle.py.

Any two events are a millisecond apart.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from pykern import _C
from pykern.benchmark import run, sections
from pykern.cli import app
from pykern.doctor import gpus as doctor
from pykern.runtime.gpu import peers
from pykern.topo import gpus as topo_gpus
from pykern.topo import kernel_copy, links, timed
from tests.device_oracle.oracle import gpus

SMALL, LARGE = 4096, 65536


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "LINK_SIZES", (SMALL, LARGE))
    monkeypatch.setattr(timed, "_BYTES_OF_A_ROUND", 8 * LARGE)
    monkeypatch.setattr(timed, "WIDTH", 8)
    monkeypatch.setattr(peers, "_NUM_BYTES", 4096)
    # The oracle has no processors to run a kernel of Triton.
    monkeypatch.setattr(kernel_copy, "kernel_copy", Tensor.copy_)


def test_links_are_ordered_pairs_with_rates_by_size() -> None:
    with gpus(3):
        found = links.links()
    assert [(link.sender, link.receiver) for link in found] == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1),
    ]  # fmt: skip
    for link in found:
        # 64 copies of the small size in a millisecond, 8 of the large one.
        assert link.bytes_per_ns == {SMALL: 64 * SMALL / 1e6, LARGE: 8 * LARGE / 1e6}
        assert link.latency_ns == 1e6 / 64
        assert link.both_ways == link.bytes_per_ns
        assert link.copy_slows == 1
        is_next = (link.sender + 1) % 3 == link.receiver
        assert link.among_all == (8 * LARGE / 1e6 if is_next else 0)
        assert link.by_kernel == 8 * LARGE / 1e6
        assert link.arrives


def test_gpus_are_measured_with_the_host() -> None:
    with gpus(2):
        found = topo_gpus.gpus()
    assert [gpu.name for gpu in found] == ["the CPU"] * 2
    for gpu in found:
        assert gpu.from_host == gpu.to_host == {SMALL: 64 * SMALL / 1e6, LARGE: 8 * LARGE / 1e6}
        assert gpu.from_pageable == 8 * LARGE / 1e6
        assert gpu.copy_slows == 1
        # The oracle's GPUs are on no bus.
        assert gpu.numa_node is None
        # Eight copies of half the size, read and written; 16 products of matrices of 8 x 8.
        assert gpu.memory_bytes_per_ns == 2 * 16 * (LARGE // 2) / 1e6
        assert gpu.flops_per_ns == 16 * 2 * 8**3 / 1e6


def test_bytes_that_change_on_their_way_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(2):
        monkeypatch.setattr(links, "_copied", lambda into, source: into.copy_(source).add_(1))
        assert not any(link.arrives for link in links.links())


def test_the_doctor_tells_of_bytes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(2):
        assert doctor.changed_pairs(2) == []
        move = Tensor.to

        def moved(tensor: Tensor, device: Any) -> Tensor:
            return move(tensor, device).add_(str(device) == "cuda:1")

        monkeypatch.setattr(Tensor, "to", moved)
        assert doctor.changed_pairs(2) == ["0 to 1", "1 to 0"]


def test_the_command_prints_gpus_and_links() -> None:
    with gpus(2):
        printed = CliRunner().invoke(app, ["topo"]).stdout
    assert "GPU 1: the CPU, " in printed
    assert "GPU 0 to GPU 1: 0.5 GB/s, 15.6 µs for 4 KiB, 0.5 GB/s while both send" in printed
    assert "GPU 0 from host: 4 KiB 0.262, 64 KiB 0.524 GB/s" in printed
    sizes = "4 KiB 0.262 [0.262], 64 KiB 0.524 [0.524] GB/s [while both send]"
    assert f"GPUs 0 and 1 by size: {sizes}" in printed
    assert "0.5 GB/s by a kernel" in printed


def test_no_kernel_is_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpus(2):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(kernel_copy, "kernel_copy", None)
        assert [link.by_kernel for link in links.links()] == [0, 0]


def test_no_kernel_writes_where_a_gpu_has_no_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_can_access_peer", lambda *_: False)
    with gpus(2):
        assert [link.by_kernel for link in links.links()] == [0, 0]


def _layers(_: str, num_devices: int, num_microbatches: int) -> Any:
    """In the place of the GPT, whose kernels are Triton's: layers whose operations are torch's."""
    layers = [nn.Linear(8, 8) for _ in range(2 * num_devices)]
    ids = torch.zeros(num_microbatches, 4, dtype=torch.int64)
    return nn.Sequential(nn.Embedding(256, 8), *layers, nn.Linear(8, 256)), ids, ids


def test_a_box_of_gpus_is_benchmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "_STEPS", 2)
    monkeypatch.setattr(sections, "_WARMUPS", 1)
    monkeypatch.setattr(sections, "_gpt", _layers)
    monkeypatch.setattr(sections, "_COPIED_BYTES", 2**12)
    monkeypatch.setattr(sections, "_PEERS", ())
    monkeypatch.setattr(sections, "_FUSED", (4, 16))
    # Its processes need GPUs, whatever this torch is built with.
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "nccl")
    with gpus(2):
        found = run("cuda", 300)
    assert list(found.left_out) == ["torch.distributed.pipelining"]
    assert "torch must have nccl" in found.left_out["torch.distributed.pipelining"]
    assert found.machine["GPUs"] == "the CPU, the CPU"
    names = [figure.name for figure in found.figures]
    assert len(names) == len(set(names)) == 9 + 2 + 6 + 6
    assert "copy of 256 MiB, cuda:1 to cuda:0" in names
    assert "a GPT's step, one_f_one_b, one graph, 2 x cuda" in names
    assert "swiglu, forward and backward, plain torch" in names

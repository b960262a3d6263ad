"""`pykern topo` reads what Linux lists, and prints a line for each thing measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from pykern.cli import app
from pykern.topo import Topology, gpus
from pykern.topo.copies import copy_bytes_per_ns, flops_per_ns
from pykern.topo.system import Cache, Node, caches, cpus_in, node_of_device, nodes


def _write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text + "\n")


def test_a_shared_cache_is_listed_once_and_nodes_go_by_number(tmp_path: Path) -> None:
    for cpu in range(2):
        cache = tmp_path / f"cpu/cpu{cpu}/cache"
        _write(cache / "index0", level="1", type="Data", size="32K", shared_cpu_list=f"{cpu}")
        _write(cache / "index3", level="3", type="Unified", size="8M", shared_cpu_list="0-1")
    for number in (10, 2):
        _write(tmp_path / f"node/node{number}", cpulist=f"{number}")
    assert caches([0, 1], tmp_path) == (
        Cache(1, "Data", "32K", "0"),
        Cache(1, "Data", "32K", "1"),
        Cache(3, "Unified", "8M", "0-1"),
    )
    assert nodes(tmp_path) == (Node(2, "2"), Node(10, "10"))


def test_caches_go_by_their_first_cpu(tmp_path: Path) -> None:
    for cpu in (10, 2):
        entry = tmp_path / f"cpu/cpu{cpu}/cache/index0"
        _write(entry, level="1", type="Data", size="32K", shared_cpu_list=f"{cpu}-{cpu + 1}")
    assert [cache.cpus for cache in caches([10, 2], tmp_path)] == ["2-3", "10-11"]
    assert cpus_in("0-3,8") == [0, 1, 2, 3, 8]


@pytest.mark.parametrize(
    ("shared", "told"),
    [
        (["0-7", "8-15"], "CPUs 0-7 and 8-15"),
        ([f"{cpu}" for cpu in range(192)], "192 of them, each for 1 CPU"),
        ([f"{cpu},{cpu + 96}" for cpu in range(96)], "96 of them, each for 2 CPUs"),
        (["0", *(f"{cpu},{cpu + 96}" for cpu in range(1, 9))], "9 of them, each for up to 2 CPUs"),
    ],
)
def test_many_caches_that_are_alike_take_one_line(
    monkeypatch: pytest.MonkeyPatch, shared: list[str], told: str
) -> None:
    alike = tuple(Cache(1, "Data", "32K", cpus) for cpus in shared)
    found = Topology(2, alike, (), {4096: 9.5}, 2500.0)
    monkeypatch.setattr("pykern.topo.measure", lambda: found)
    lines = CliRunner().invoke(app, ["topo"]).stdout.splitlines()
    assert [line for line in lines if line.startswith("L1")] == [f"L1 Data: 32K, {told}"]


def test_absent_files_give_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "cpu/cpu0/cache/index0", level="1", type="Data")
    assert caches([0, 1], tmp_path) == ()
    assert nodes(tmp_path) == ()


def test_a_core_has_a_rate_of_products() -> None:
    threads = torch.get_num_threads()
    assert flops_per_ns() > 0
    assert torch.get_num_threads() == threads


def test_measuring_copies_keeps_torchs_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert copy_bytes_per_ns(4096) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_command_prints_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Topology(2, (Cache(3, "Unified", "8M", "0-1"),), (Node(0, "0-1"),), {4096: 9.5}, 2500.0)
    monkeypatch.setattr("pykern.topo.measure", lambda: found)
    printed = CliRunner().invoke(app, ["topo"]).stdout
    for text in ("2 usable", "8M, CPUs 0-1", "NUMA node 0", "4 KiB", "9.5 GB/s", "2.5 µs"):
        assert text in printed


def test_a_gpu_is_near_the_node_that_linux_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, node in (("0000:3b:00.0", "1"), ("0001:00:1f.0", "-1")):
        _write(tmp_path / address, numa_node=node)
    assert node_of_device("0000:3b:00.0", tmp_path) == 1
    assert node_of_device("0001:00:1f.0", tmp_path) is None
    assert node_of_device("0000:00:00.0", tmp_path) is None
    asked: list[str] = []
    monkeypatch.setattr(gpus, "node_of_device", asked.append)
    gpus._numa_node(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0))
    assert asked == ["0000:3b:00.0"]
    assert gpus._numa_node(SimpleNamespace(pci_bus_id=0x3B)) is None

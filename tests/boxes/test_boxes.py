"""Profiles of boxes: those that come with pykern, files, and what is refused by its key."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pykern import boxes
from pykern.boxes import Box, BoxDevice, BoxHost, BoxLink, RateBySize, load, save
from pykern.cli import app
from pykern.scale import DGX_H100, Job, Layout, Transformer, cluster_of, predict
from pykern.topo import MeasuredGpu, MeasuredLink, Topology, as_box

NAMES = ["a100x4", "h100x8", "rtx3090x2", "rtx4090x8"]


@pytest.fixture
def content() -> dict[str, Any]:
    # As a file has it: lists in the places of tuples.
    found: dict[str, Any] = json.loads(json.dumps(asdict(load("rtx3090x2"))))
    return found


def test_the_shipped_boxes_have_their_figures_and_say_where_from():
    assert boxes.published() == NAMES
    for name in NAMES:
        box = load(name)
        assert box.basis == "published, not measured"
        assert len(box.sources) >= 2
        assert f"x{len(box.devices)}" in name
        assert box.link(0, len(box.devices) - 1) == box.links[0]
    assert load("h100x8").devices[7].memory_bytes == 80e9
    assert load("rtx3090x2").link(0, 1) == BoxLink(((0, 1),), 56.25, 3_400.0)


def test_a_box_is_named_by_its_devices():
    four, all_eight = load("4x4090"), load("rtx4090x8")
    assert four.devices == all_eight.devices[:4]
    assert four.links[0].groups == ((0, 1, 2, 3),)
    assert four.name.startswith("4 of 8 x")
    assert load("8xh100") == load("h100x8")
    assert load("2xrtx3090") == load("2x3090") == load("rtx3090x2")
    with pytest.raises(ValueError, match=r"the box must have 1 to 2 devices, as .*, got 3"):
        load("3x3090")
    with pytest.raises(ValueError, match=r"device of the box must be one of .*, got '4080'"):
        load("2x4080")


def test_a_box_is_the_cluster_that_scale_has_of_it():
    assert cluster_of(load("h100x8")) == DGX_H100


def test_a_file_is_read_as_it_was_written(tmp_path):
    devices = (
        BoxDevice("one", 1e9, None, 2.0, (9, 0), 132),
        BoxDevice("other", None, 3, None, None, None),
    )
    links = (BoxLink(((0, 1),), 1.5, 10.0),)
    box = Box(3, "mine", "measured", (), devices, links, BoxHost(4, None))
    save(box, tmp_path / "box.json")
    assert load(tmp_path / "box.json") == box
    assert box.link(0, 1) == links[0]
    assert replace(box, links=()).link(0, 1) is None


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner: Any = content
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("version", 1, "version must be 3, got 1"),
        ("basis", "guessed", "basis must be 'measured' or"),
        ("devices", [], "devices must be at least one"),
        ("devices.1.memory_bytes", "24", r"devices\[1\].memory_bytes must be a float, got '24'"),
        ("devices.1.flops_per_ns", -1, r"devices\[1\].flops_per_ns must be a finite number above"),
        ("links.0.latency_ns", 0, r"links\[0\].latency_ns must be a finite number above 0, got 0"),
        ("links.0.bytes_per_ns", None, r"links\[0\].bytes_per_ns must be a float, got None"),
        ("links.0.groups", [[0, 2]], r"links\[0\].groups\[0\] must have different devices of 0"),
        ("links.0.groups", [[0, 0]], r"links\[0\].groups\[0\] must have different devices"),
        ("host.cores", 1.5, r"host.cores must be a int, got 1.5"),
        ("host", {}, r"host must have the keys \['bytes_per_ns', 'cores'\]"),
        ("devices.0.numa_node", 0.5, r"devices\[0\].numa_node must be a int, got 0.5"),
        ("links.0.by_size", [{"num_bytes": 0, "bytes_per_ns": 1.0, "both_ways": None}],
         r"links\[0\].by_size\[0\].num_bytes must be a finite number above 0, got 0"),
        ("colour", "red", "the value must have the keys"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_key(tmp_path, content, path, value, told):
    file = tmp_path / "box.json"
    file.write_text(json.dumps(changed(content, path, value)))
    with pytest.raises(ValueError, match=f"box.json must be the profile of a box.*: {told}"):
        load(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "the text must be JSON, got its end at line 1, column 1"),
        (b"[]", "version must be"),
        (b"no", "the text must be JSON, got 'n' at line 1, column 1"),
        (b"[\xff", "the text must be UTF-8, got byte 255 at offset 1"),
        (b"[" * 5000, "the JSON must have at most 200 levels"),
        (b'{"version": NaN}', "numbers of JSON must be finite"),
        (b" " * (1 << 24) + b" ", r"box\.json must have at most 16777216 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path, text, told):
    file = tmp_path / "box.json"
    file.write_bytes(text)
    expected = rf"box\.json must be the profile of a box, got another file: .*{told}"
    with pytest.raises(ValueError, match=expected):
        load(file)


def test_an_unknown_name_is_refused_with_the_one_that_was_meant(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'h100x8'"):
        load("h100x9")


def test_neither_nothing_nor_a_folder_is_a_box(tmp_path, monkeypatch):
    """The empty path was told to be a folder."""
    monkeypatch.chdir(tmp_path)
    Path("boxes").mkdir()
    for name in ("", "boxes"):
        with pytest.raises(ValueError, match=f"box must be one of .*, got '{name}'"):
            load(name)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.json")


def test_a_measured_machine_is_a_box(tmp_path):
    rates = {4096: 1.0, 65536: 20.0}
    back = {4096: 1.0, 65536: 10.0}
    gpu = MeasuredGpu("a GPU", 80, 132, (9, 0), rates, back, 5.0, 1.0, 2000.0, 7e5, 1)
    both = [{4096: 1.5, 65536: 30.0}, {4096: 1.0, 65536: 35.0}]
    ways = [
        MeasuredLink(0, 1, True, True, 900.0, {4096: 2.0, 65536: 40.0}, both[0], 0.0, 35.0, 1.1),
        MeasuredLink(1, 0, True, True, 800.0, {4096: 3.0, 65536: 50.0}, both[1], 0.0, 35.0, 1.2),
    ]
    found = Topology(2, (), (), {4096: 9.5, 65536: 8.0}, 2500.0)
    box = as_box(replace(found, gpus=(gpu, gpu), links=tuple(ways)))
    by_host = [(RateBySize(4096, 1.0), RateBySize(65536, of)) for of in (20.0, 10.0)]
    assert box.devices == (BoxDevice("a GPU", 80, 2000.0, 7e5, (9, 0), 132, 1, *by_host),) * 2
    # The slower one of two directions counts.
    sizes = RateBySize(4096, 2.0, 1.0), RateBySize(65536, 40.0, 30.0)
    assert box.links == (BoxLink(((0, 1),), 40.0, 900.0, sizes, 1.2),)
    assert box.host == BoxHost(2, 10.0)
    cores = as_box(found)
    assert cores.devices == (BoxDevice("CPU core", None, 8.0, None, None, None),) * 2
    sizes = RateBySize(4096, 9.5), RateBySize(65536, 8.0)
    assert cores.link(0, 1) == BoxLink(((0, 1),), 8.0, 2500.0, sizes)
    # The file and the table keep all sizes.
    save(box, tmp_path / "box.json")
    assert load(tmp_path / "box.json") == box
    shown = CliRunner().invoke(app, ["topo", "--box", str(tmp_path / "box.json")]).stdout
    assert "between 0 1 by size: 4 KiB 2 [1], 64 KiB 40 [30] GB/s [while both send]" in shown
    assert "between 0 1 beside products: these take 1.20 x" in shown
    assert "device 1 from host: 4 KiB 1, 64 KiB 20 GB/s" in shown
    assert "device 1 is near: NUMA node 1" in shown
    # Rates were missing from every measured box, so that nothing was predicted for it.
    assert cluster_of(box).gpu.flops_per_ns == 7e5
    assert as_box(replace(found, flops_per_ns=50.0)).devices[0].flops_per_ns == 50.0
    unknown = replace(box.devices[0], flops_per_ns=None)
    with pytest.raises(ValueError, match="the box must tell its flops_per_ns for a prediction"):
        cluster_of(replace(box, devices=(unknown, unknown)))


def test_equal_gpus_whose_measured_rates_differ_are_a_cluster():
    """Two GPUs of a measured box are never equal to the last digit, and all were refused."""
    box = load("rtx3090x2")
    slower = replace(box.devices[1], memory_bytes_per_ns=900.0, numa_node=0)
    found = cluster_of(replace(box, devices=(box.devices[0], slower)))
    assert found.gpu == replace(cluster_of(box).gpu, memory_bytes_per_ns=900.0)


def test_a_file_of_the_version_before_is_read(tmp_path):
    content = json.loads((Path(boxes.__file__).parent / "published/rtx3090x2.json").read_text())
    assert content["version"] == 2
    (tmp_path / "box.json").write_text(json.dumps(content))
    box = load(tmp_path / "box.json")
    assert box == load("rtx3090x2")
    assert (box.version, box.links[0].by_size, box.devices[0].numa_node) == (3, (), None)


def test_boxes_that_scale_cannot_take_are_refused(content):
    box = load("rtx3090x2")
    mixed = replace(box, devices=(box.devices[0], replace(box.devices[1], name="another")))
    with pytest.raises(ValueError, match=r"devices\[1\] of the box must be like devices\[0\]"):
        cluster_of(mixed)
    with pytest.raises(ValueError, match="must tell its link between 0 and 1"):
        cluster_of(replace(box, links=()))


def test_the_commands_take_a_box(tmp_path, monkeypatch):
    file = tmp_path / "box.json"
    monkeypatch.setattr("pykern.topo.measure", lambda: Topology(2, (), (), {4096: 9.5}, 2500.0))
    done = CliRunner().invoke(app, ["topo", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert f"written: {file}" in done.stdout
    assert load(file).host.cores == 2
    shown = CliRunner().invoke(app, ["topo", "--box", "a100x4"]).stdout
    assert "(published, not measured)" in shown
    assert "80 GB, 1935 GB/s, 312 TFLOP/s" in shown
    assert "between 0 1 2 3: 32 GB/s one way" in shown
    assert "source: NVIDIA A100 data sheet" in shown
    refused = CliRunner().invoke(app, ["topo", "--box", "a100x5"])
    assert refused.exit_code == 2
    assert "Did you mean 'a100x4'" in " ".join(refused.output.split())

    sizes = ("--layers", "8", "--width", "512", "--sequence", "128", "--batch", "64")
    scale = ["scale", *sizes, "--gpus", "4", "--top", "1", "--schedule", "gpipe", "--box"]
    row = CliRunner().invoke(app, [*scale, "a100x4"], env={"COLUMNS": "200"}).stdout.split("\n")[1]
    layout = Layout(*map(int, row.split()[1].split("x")))
    job = Job(Transformer(8, 512, 128, 32_000), 64)
    found = predict(job, cluster_of(load("a100x4")), layout, "gpipe")
    assert row.split()[3] == f"{found.step_ns / 1e6:,.0f}"
    refused = CliRunner().invoke(app, [*scale, str(file)])
    assert refused.exit_code == 2
    assert "must tell its flops_per_ns" in " ".join(refused.output.split())

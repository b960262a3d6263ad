"""The picture of a box: a cell for each two devices, darker for faster links."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pykern.boxes import BoxLink, load, save_heat_map
from pykern.cli import app

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path) -> tuple[list[str], list[str]]:
    """The texts and the colours of cells of an SVG."""
    root = ElementTree.parse(path).getroot()
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    return texts, [element.attrib["fill"] for element in root.iter(f"{SVG}path")]


def test_a_cell_has_bandwidth_and_latency_and_the_title_the_basis(tmp_path: Path) -> None:
    box = load("rtx3090x2")
    save_heat_map(box, tmp_path / "box.svg")
    texts, fills = drawn(tmp_path / "box.svg")
    assert texts[0] == box.name
    assert texts[1].endswith("published, not measured")
    assert texts.count("56.2") == texts.count("3.4 µs") == 2
    assert fills == ["#efefef", fills[1], fills[1], "#efefef"]


def test_faster_links_are_darker_and_missing_ones_told(tmp_path: Path) -> None:
    box = load("a100x4")
    links = (BoxLink(((0, 1),), 300.0, 900.0), BoxLink(((0, 2), (1, 2)), 30.0, 9_000.0))
    save_heat_map(replace(box, links=links, name="a & <b>$x"), tmp_path / "box.svg")
    texts, fills = drawn(tmp_path / "box.svg")
    assert texts[0] == "a & <b>$x"
    assert texts.count("no link") == 6
    brightness = [sum(bytes.fromhex(fill[1:])) for fill in fills]
    assert brightness[1] < brightness[2] < brightness[3] == brightness[0]


def test_slow_links_have_as_few_digits(tmp_path: Path) -> None:
    links = (BoxLink(((0, 1),), 1234.5, 123_456.0),)
    save_heat_map(replace(load("rtx3090x2"), links=links), tmp_path / "box.svg")
    texts, _ = drawn(tmp_path / "box.svg")
    assert texts.count("1234") == texts.count("123 µs") == 2


def test_the_guide_shows_the_picture_of_now(tmp_path: Path) -> None:
    shown = Path(__file__).parents[2] / "docs/topo.svg"
    save_heat_map(load("a100x4"), tmp_path / "topo.svg")
    made = (tmp_path / "topo.svg").read_text()
    assert made == shown.read_text(), "run pykern topo --box a100x4 --heatmap docs/topo.svg"


@pytest.mark.parametrize("name", ["box.svg", "box.png"])
def test_the_same_box_makes_the_same_file(tmp_path: Path, name: str) -> None:
    made = []
    for _ in range(2):
        save_heat_map(load("h100x8"), tmp_path / name)
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]
    assert len(made[0]) > 1000


def test_the_command_draws_a_box(tmp_path: Path) -> None:
    picture = tmp_path / "topo.svg"
    done = CliRunner().invoke(app, ["topo", "--box", "rtx4090x8", "--heatmap", str(picture)])
    assert done.exit_code == 0, done.output
    assert f"written: {picture}" in done.stdout
    assert len(drawn(picture)[1]) == 64
    refused = CliRunner().invoke(app, ["topo", "--box", "a100x4", "--heatmap", "box.gif"])
    assert refused.exit_code == 2
    assert "must end in .png, .pdf or .svg" in " ".join(refused.stderr.split())

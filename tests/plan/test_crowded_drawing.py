"""Drawings of many microbatches keep their colours, and say where numbers fit."""

import re
from math import ceil
from pathlib import Path

import pytest

from pykern import schedules
from pykern.plan import Costs, Timeline, simulate
from pykern.plan.drawing import as_text, save_picture
from pykern.plan.drawing.terminal import fitting_width
from tests.support.full_disk import full_disk


def crowded(num_microbatches: int) -> Timeline:
    return simulate(schedules.interleaved(4, num_microbatches), Costs(1e6, 2e6))


def bars(path: Path, num_microbatches: int) -> list[str]:
    """The paths with the cells of a picture, without those of the legend."""
    save_picture({"": crowded(num_microbatches)}, path)
    return [line for line in path.read_text().split("\n") if line.count("z") > 1]


def test_white_borders_do_not_cover_narrow_cells(tmp_path: Path) -> None:
    found = {}
    for num_microbatches in (4, 64, 512):
        lines = bars(tmp_path / f"{num_microbatches}.svg", num_microbatches)
        found[num_microbatches] = [
            (float(width), float(border[0]) if border else 0.0)
            for line in lines
            for border in [re.findall(r'stroke-width="([\d.]+)"', line)]
            for width in re.findall(r"h([\d.]+)v", line)
        ]
        assert len(found[num_microbatches]) == 4 * num_microbatches * 4
    every = [cell for cells in found.values() for cell in cells]
    assert all(border <= width / 4 for width, border in every)
    assert {border for _, border in found[4]} == {0.6}
    assert {border for _, border in found[512]} == {0.0}


def test_every_entry_of_the_legend_has_a_colour(tmp_path: Path) -> None:
    lines = bars(tmp_path / "plan.svg", 4)
    text = (tmp_path / "plan.svg").read_text()
    swatches = re.findall(r'<path fill="(#\w+)" d="M[\d.]+ [\d.]+h12v9h-12z"/>', text)
    assert "darker: later chunks" in text
    assert len(set(swatches)) == 3
    assert all(any(f'fill="{swatch}"' in line for line in lines) for swatch in swatches)


def test_microbatches_fit_in_the_width_that_is_told() -> None:
    plan = schedules.interleaved(2, 4)
    timeline = simulate(plan, Costs(1e6, 2e6))
    width = ceil(fitting_width({"": timeline}, 40))
    assert width > 40
    wide, narrow = (as_text({"": timeline}, width=each).plain for each in (width, 40))
    for number in range(plan.num_microbatches):
        assert wide.count(f"F{number}") == wide.count(f"B{number}") == plan.num_stages
    assert narrow.count("F0") < plan.num_stages


@pytest.mark.parametrize("share", [0.0, 1e-320, 1e-300])
@pytest.mark.parametrize("whole", [1e-320, 1e-300, 1e300])
def test_any_times_are_drawn(share: float, whole: float, tmp_path: Path) -> None:
    """Widths that no float holds ended in errors of Python, and in pictures with nan."""
    timeline = {"": simulate(schedules.gpipe(2, 3), Costs(share, whole))}
    assert as_text(timeline, width=80).plain.count("|\n") == 2
    assert fitting_width(timeline, 80) > 0
    save_picture(timeline, tmp_path / "plan.svg")
    places = re.findall(r'[xd]="([^"]*)"', (tmp_path / "plan.svg").read_text())
    assert places
    assert not any(re.search("nan|inf", each) for each in places)


def test_a_png_of_gigabytes_is_refused(tmp_path: Path) -> None:
    """Memory ran out in the library that draws."""
    timeline = {"": simulate(schedules.gpipe(20_000, 1), Costs(1, 2))}
    with pytest.raises(ValueError, match=r"at most 536870912 pixels, got 1800 x .* Write an \.svg"):
        save_picture(timeline, tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_microbatches", [8, 50])
@pytest.mark.parametrize("suffix", [".pdf", ".png", ".svg"])
def test_on_a_disk_that_is_full_the_error_is_the_disks(
    tmp_path: Path, suffix: str, num_microbatches: int
) -> None:
    """The error was that of matplotlib's clean-up: an AttributeError, or one of zlib."""
    path = tmp_path / f"picture{suffix}"
    # With the first picture, matplotlib writes down which fonts there are.
    save_picture({"": crowded(num_microbatches)}, path)
    path.unlink()
    with full_disk(500), pytest.raises(OSError, match="File too large") as caught:
        save_picture({"": crowded(num_microbatches)}, path)
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []

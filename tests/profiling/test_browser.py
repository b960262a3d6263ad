"""The page of a profile as headless Chromium shows it, where Chromium is installed."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pykern.plan import Costs, simulate
from pykern.profiling import report_of
from pykern.profiling.page import save_page
from pykern.schedules import one_f_one_b
from tests.profiling.planted import PLANTED

CHROMIUM = shutil.which("chromium")
# The canvas is as wide as the window, less the margins of the page.
WIDTH, MARGINS, ROW, NAMES = 1200, 48, 26, 80

# In front of the page's own script: rectangles that it paints, and errors.
COUNTS = """<script>
const seen = { errors: [], rectangles: 0 };
addEventListener("error", event => seen.errors.push(event.message));
const fill = CanvasRenderingContext2D.prototype.fillRect;
CanvasRenderingContext2D.prototype.fillRect = function (...of) { seen.rectangles++; fill.apply(this, of); };
</script>
"""  # noqa: E501 - a line of JavaScript
# Behind it: a draw of all, one of a part, and one that follows a microbatch.
LOOKS = """<script>{
function drawn(change) {
  change();
  seen.rectangles = 0;
  draw();
  return seen.rectangles;
}
const length = view.to;
seen.all = drawn(() => {});
seen.colours = canvases.map(canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(pixels.buffer)).size;
});
seen.sizes = canvases.map(canvas => [canvas.width, canvas.height]);
seen.followed = drawn(() => { kept = 1; });
seen.part = drawn(() => { kept = null; view.from = 0.4 * length; view.to = 0.401 * length; });
const wheel = new WheelEvent("wheel", { deltaY: -500, cancelable: true });
canvases[0].dispatchEvent(wheel);
seen.zoomed = view.to - view.from < 0.001 * length;
const told = document.createElement("output");
told.textContent = JSON.stringify(seen);
document.body.append(told);
}</script>
"""


def shown(page: Path, folder: Path) -> Any:
    """The things that the page's script has painted."""
    assert CHROMIUM is not None
    text = page.read_text(encoding="ascii")
    data = text.index("<script>")
    looked_at = folder / "looked_at.html"
    looked_at.write_text(text[:data] + COUNTS + text[data:].replace("</html>", LOOKS + "</html>"))
    # Root has no sandbox, and a test needs none: the page is pykern's own.
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},900"]
    command += ["--force-device-scale-factor=1", "--dump-dom", looked_at.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = re.search(r"<output>(.*)</output>", done.stdout, re.S)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.timeout(120)
def test_both_timelines_are_painted(tmp_path: Path) -> None:
    report = report_of(PLANTED["slow device"](Random(5)))
    report.save_html(tmp_path / "page.html")
    seen = shown(tmp_path / "page.html", tmp_path)
    assert seen["errors"] == []
    assert len(seen["sizes"]) == 2
    rows = report.seen.plan.num_devices
    for wide, high in seen["sizes"]:
        assert 0.8 * WIDTH <= wide <= WIDTH
        assert high > rows * ROW
    # The ground, two kinds, their texts, the names of rows and the axis.
    assert min(seen["colours"]) > 5
    # Each action, the ground and the marks of the axis, of two timelines.
    assert seen["all"] >= 2 * report.seen.plan.num_actions
    assert seen["followed"] > seen["all"]
    assert seen["part"] < seen["all"]
    assert seen["zoomed"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.timeout(120)
def test_100_000_actions_cost_no_more_than_the_pixels(tmp_path: Path) -> None:
    plan = one_f_one_b(8, 3125)
    timeline = simulate(plan, Costs(1e5, 2e5))
    page = tmp_path / "page.html"
    save_page("many", "many actions", [], {"planned": timeline, "measured": timeline}, page)
    assert 2 * plan.num_actions == 100_000
    seen = shown(page, tmp_path)
    assert seen["errors"] == []
    # At most two rectangles begin in a column of a row, beside the ground and the axis.
    columns = WIDTH - MARGINS - NAMES
    assert columns < seen["all"] <= 2 * (2 * 8 * (columns + 2) + 20)
    assert seen["followed"] <= seen["all"] + 2 * 2 * 8
    assert 0 < seen["part"] < 1000

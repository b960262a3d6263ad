"""docs/reliability.md shows the figures that are kept."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_of_the_figures() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_reliability.py"))["made"]()
    page = (ROOT / "docs/reliability.md").read_text()
    assert made == page, "run python docs/make_reliability.py"
    assert "(docs/reliability.md)" in (ROOT / "README.md").read_text()

"""The documentation shows the table that these tests make."""

import runpy
from pathlib import Path


def test_the_page_has_the_table(root: Path) -> None:
    made = runpy.run_path(str(root / "docs/make_features.py"))["made"]()
    assert made == (root / "docs/features.md").read_text(), "run python docs/make_features.py"
    assert made.count("| `test_") == 46
